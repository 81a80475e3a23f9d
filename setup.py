"""Builds the optional helpers in C; without a C compiler the package installs and runs all the
same.
"""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            f"stratakv.{package}.{name}",
            sources=[f"src/stratakv/{package.replace('.', '/')}/{name}.c"],
            # Without contraction: a sum in C is rounded as the same sum in torch is.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            libraries=["m"],
            depends=glob("src/stratakv/**/*.h", recursive=True),
            optional=True,
        )
        for package, name in (
            ("core", "_page_keys"),
            ("tree", "_path_columns"),
            ("transfer", "_gather"),
            ("storage.file", "_page_io"),
            ("sparse", "_swap_in"),
            ("sparse", "_reads"),
            ("engine.attention", "_row_attention"),
            ("engine.huggingface", "_state_steps"),
            ("engine.deepseek", "_scores"),
        )
    ]
)
