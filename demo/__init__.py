"""`make demo`: a scripted chat, served with the cache and without it, side by side, and then after a
restart."""
