"""Models in place of SGLang's own, found by ``SGLANG_EXTERNAL_MODEL_PACKAGE``."""
