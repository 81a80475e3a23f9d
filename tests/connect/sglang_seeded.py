"""Back ends that are wrong on purpose, which the traffic must see.

Owns the bugs: of pages that are asked for together, each but the first comes back as the one before
it, or pages are said to be there that nobody has read. Checksums are right.
"""

from dataclasses import replace

from stratakv.connect.sglang import StrataStorage


def shifted(keys):
    return [*keys[:1], *keys[:-1]]


class PageBefore(StrataStorage):
    def batch_get_v1(self, keys, host_indices, extra_info=None):
        return super().batch_get_v1(shifted(keys), host_indices, extra_info)

    def batch_get_v2(self, transfers, extra_info=None):
        wrong = [replace(one, keys=shifted(one.keys or [])) for one in transfers]
        return super().batch_get_v2(wrong, extra_info)


class IndexBefore(StrataStorage):
    """Wrong in pools beside KV alone."""

    def batch_get_v2(self, transfers, extra_info=None):
        wrong = [
            one if str(one.name) == "kv" else replace(one, keys=shifted(one.keys or []))
            for one in transfers
        ]
        return super().batch_get_v2(wrong, extra_info)


class StatesLeftOut(StrataStorage):
    """DeepSeek-V4's, of tokens that have no row yet."""

    def batch_get_v2(self, transfers, extra_info=None):
        states = [one for one in transfers if str(one.name).endswith("_state")]
        rest = [one for one in transfers if not str(one.name).endswith("_state")]
        unread = {one.name: [True] * len(one.keys or []) for one in states}
        return super().batch_get_v2(rest, extra_info) | unread
