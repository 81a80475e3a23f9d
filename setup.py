"""Builds the optional copy helper; without a C compiler the package installs and runs all the
same.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "stratakv.transfer._gather",
            sources=["src/stratakv/transfer/_gather.c"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
