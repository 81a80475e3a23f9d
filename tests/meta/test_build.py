"""A change of any source in C builds the helpers again: one of an older checkout takes other
arguments, and computes what the revision of pages no longer says."""

import subprocess

from tests.meta.source import ROOT


def test_make_builds_again_after_a_change_of_any_source_in_c():
    ask = ["make", "-s", "--no-print-directory", "--eval=show: ; @echo $(BUILD)", "show"]
    done = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True)
    sources = {one.relative_to(ROOT).as_posix() for one in (ROOT / "src").rglob("*.[ch]")}
    assert sources
    assert sorted(sources - set(done.stdout.split())) == []
