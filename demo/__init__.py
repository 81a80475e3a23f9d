"""`make demo`: a scripted chat, with the cache and without it, side by side; then a restart."""
