"""What a body says of its hand-off: a refusal names its field, and each role takes its own."""

import pytest

from stratakv.core.choices import BOOTSTRAP_PORT
from stratakv.core.config import ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.request import TransferSession
from stratakv.serve.errors import ApiError
from stratakv.serve.hand_off import (
    SALT_HEADER,
    DecodeRules,
    HandOffOptions,
    PrefillRules,
    RemoteDecode,
    RemotePrefill,
    Rooms,
    UnifiedRules,
    asked_for,
    check_salt,
    place,
    salt_of,
)
from stratakv.serve.prefill_hosts import PrefillHosts

ROOM = {"bootstrap_host": "a", "bootstrap_port": 7, "bootstrap_room": 3}
REMOTE = {"do_remote_prefill": True, "remote_request_id": "n", "remote_host": "a"}
PREFILL = PrefillRules("here", 8998)


def params(**more):
    return {"kv_transfer_params": REMOTE | more}


def refused(call, *given):
    with pytest.raises(ApiError) as found:
        call(*given)
    assert found.value.status == 400
    return found.value


def test_a_body_without_any_of_it_asks_for_nothing():
    nulls = dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"))
    for body in ({}, nulls, {"kv_transfer_params": None}, {"kv_transfer_params": {}},
                 {"kv_transfer_params": {"do_remote_prefill": False}}):  # fmt: skip
        assert asked_for(body) is None


def test_a_room_names_the_sessions_of_all_requests():
    assert asked_for(ROOM) == Rooms(("a",), (7,), (3,))
    assert asked_for(ROOM | {"bootstrap_port": None}) == Rooms(("a",), (BOOTSTRAP_PORT,), (3,))
    several = asked_for({
        "bootstrap_host": ["a", "::1"], "bootstrap_port": [7, 8], "bootstrap_room": [3, 4],
    })  # fmt: skip
    own = [("3-0", "a:7"), ("4-1", "[::1]:8"), ("3-2", "a:7"), ("4-3", "[::1]:8")]
    assert several.sessions(4) == tuple(TransferSession(*one) for one in own), "two choices each"


@pytest.mark.parametrize(("lists", "count"), [(2, 1), (2, 3), (3, 1), (3, 4)])
def test_lists_for_another_number_of_requests_are_refused(lists, count):
    for field in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
        several = asked_for(ROOM | {field: [ROOM[field]] * lists})
        for rules in (PREFILL, DecodeRules()):
            error = refused(rules.plan, several, count)
            assert error.param == field
            assert "allowed are one, or one for each prompt" in str(error)


def test_params_name_the_session_or_ask_for_one():
    assert asked_for({"kv_transfer_params": {"do_remote_decode": True}}) == RemoteDecode()
    assert asked_for(params()) == RemotePrefill("n", f"a:{BOOTSTRAP_PORT}")
    assert asked_for(params(remote_port=9, tp_size=1)) == RemotePrefill("n", "a:9")
    six = asked_for(params(remote_host="fe80::1%eth0", remote_port=9))
    assert six == RemotePrefill("n", "[fe80::1%eth0]:9")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (ROOM | {"bootstrap_host": None}, "bootstrap_host"),
        (ROOM | {"bootstrap_host": ""}, "bootstrap_host"),
        (ROOM | {"bootstrap_host": 7}, "bootstrap_host"),
        (ROOM | {"bootstrap_host": []}, "bootstrap_host"),
        (ROOM | {"bootstrap_host": "h" * 513}, "bootstrap_host"),
        *((ROOM | {"bootstrap_host": f"a{c}b"}, "bootstrap_host") for c in "/@?# \r\n\t\0\x7f"),
        *((ROOM | {"bootstrap_host": h}, "bootstrap_host") for h in ("127.0.0.1:1", "a:8998", ":")),
        *((ROOM | {"bootstrap_host": h}, "bootstrap_host") for h in ("[::1]", "::1:x", "::1%a b")),
        (ROOM | {"bootstrap_host": ["a", "b:1"]}, "bootstrap_host"),
        *((ROOM | {"bootstrap_port": port}, "bootstrap_port") for port in (0, 65536, "7", 1.5, [])),
        *((ROOM | {"bootstrap_room": n}, "bootstrap_room") for n in (-1, 1 << 64, "3", [], [None])),
        *(({"bootstrap_room": n, "bootstrap_host": ""}, "bootstrap_room") for n in (-1, [None])),
        ({"bootstrap_host": "a"}, "bootstrap_room"),
        ({"bootstrap_port": 7, "bootstrap_room": None}, "bootstrap_room"),
        (ROOM | params(), "bootstrap_room"),
        ({"kv_transfer_params": 7}, "kv_transfer_params"),
        (params(what=1), "kv_transfer_params.what"),
        (params(do_remote_decode=True), "kv_transfer_params"),
        (params(do_remote_prefill=1), "do_remote_prefill"),
        (params(remote_request_id=None), "kv_transfer_params"),
        (params(remote_request_id=""), "kv_transfer_params"),
        (params(remote_request_id="n" * 513), "remote_request_id"),
        (params(remote_host="a/b"), "remote_host"),
        (params(remote_host=None), "remote_host"),
        *((params(remote_host=host), "remote_host") for host in ("127.0.0.1:1", "a\tb")),
        (params(remote_port=0), "remote_port"),
    ],
)
def test_a_refusal_names_its_field(body, field):
    error = refused(asked_for, body)
    assert error.param == field
    assert str(error)


def test_each_role_takes_what_is_its_own():
    room, first, then = asked_for(ROOM), RemoteDecode(), asked_for(params())
    here = TransferSession("3-1", "a:7")
    assert UnifiedRules().plan(None, 2).sessions == (None, None)
    assert DecodeRules().plan(None, 2).sessions == (None, None)
    assert DecodeRules().plan(room, 2).sessions[1] == here
    assert DecodeRules().plan(then, 1).sessions == (TransferSession("n-0", "a:8998"),)
    assert PREFILL.plan(room, 2).sessions[1] == TransferSession("3-1"), "it is where it is"
    named = PREFILL.plan(first, 2)
    name = named.params["remote_request_id"]
    assert named.sessions == (TransferSession(f"{name}-0"), TransferSession(f"{name}-1"))
    assert PREFILL.plan(first, 1).params["remote_request_id"] != name
    again = asked_for({"kv_transfer_params": dict(named.params)})
    assert again == RemotePrefill(name, "here:8998"), "decode reads what prefill answers"


@pytest.mark.parametrize(
    ("rules", "asked", "field"),
    [
        (UnifiedRules(), asked_for(ROOM), "bootstrap_room"),
        (UnifiedRules(), RemoteDecode(), "kv_transfer_params"),
        (UnifiedRules(), asked_for(params()), "kv_transfer_params"),
        (PREFILL, None, "bootstrap_room"),
        (PREFILL, asked_for(params()), "kv_transfer_params"),
        (DecodeRules(), RemoteDecode(), "kv_transfer_params"),
    ],
)
def test_what_is_not_of_a_role_is_refused_by_field(rules, asked, field):
    assert refused(rules.plan, asked, 1).param == field


def test_a_tenant_s_salt_comes_from_the_header_or_the_body():
    assert salt_of(None, None) is None
    assert salt_of(None, "a") == salt_of("a", None) == salt_of("a", "a") == "a"
    assert salt_of("", None) == ""
    assert refused(salt_of, "a", "b").param == "cache_salt"
    assert refused(salt_of, "", "b").param == "cache_salt"
    assert refused(salt_of, "s" * 513, None).param == SALT_HEADER


def test_a_room_without_a_salt_is_refused_unless_all_share():
    room, share = asked_for(ROOM), HandOffOptions(unsalted_rooms=True)
    assert refused(check_salt, HandOffOptions(), room, None).param == "cache_salt"
    for options, asked, salt in (
        (HandOffOptions(), room, ""),
        (HandOffOptions(), room, "a"),
        (share, room, None),
        (HandOffOptions(), asked_for(params()), None),
        (HandOffOptions(), None, None),
    ):
        check_salt(options, asked, salt)


def test_an_address_of_six_has_brackets():
    assert (place("h", 1), place("::1", 1)) == ("h:1", "[::1]:1")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"role": "both"}, "--role"),
        ({"role": "decode", "transport": "pigeon"}, "--transport"),
        ({"transport": "nixl"}, "--transport"),
        ({"bootstrap_port": 9}, "--bootstrap-port"),
        ({"role": "decode", "bootstrap_port": 9}, "--bootstrap-port"),
        ({"role": "prefill", "bootstrap_port": 70000}, "--bootstrap-port"),
        ({"role": "prefill", "port": 9, "bootstrap_port": 9}, "--bootstrap-port"),
        ({"role": "prefill", "prefill_hosts": ("a",)}, "--prefill-hosts"),
        ({"role": "decode", "prefill_hosts": ("a:8998",)}, "--prefill-hosts"),
        ({"role": "decode", "prefill_hosts": ("http://a",)}, "--prefill-hosts"),
        ({"role": "prefill", "host": "0.0.0.0"}, "--host"),
        ({"role": "decode", "host": "::"}, "--host"),
    ],
)
def test_a_flag_that_does_not_go_with_the_role_is_refused_by_name(flags, named):
    with pytest.raises(ConfigError, match=f"^{named}"):
        ServerConfig(**flags)


# -- at which hosts decode joins -----------------------------------------------------------------

HERE, FAR = ("127.0.0.1", "127.0.0.9", "::1", "Localhost"), ("a", "10.0.0.1", "127.1", "localhost.")


def refused_field(rules, body):
    """Which field of a body is refused; None: it is planned."""
    try:
        rules.plan(asked_for(body), 2)
    except ApiError as error:
        return error.body["error"]["param"] if error.status == 400 else error
    return None


def joined(hosts, keys, host):
    """Whether one that decodes joins a prefill server there, by both routers' fields."""
    server = ServerConfig(role="decode", prefill_hosts=hosts)
    rules = DecodeRules(PrefillHosts.of(server, keys))
    params = {"do_remote_prefill": True, "remote_request_id": "n", "remote_host": host}
    bodies = (ROOM | {"bootstrap_host": [host, host]}, {"kv_transfer_params": params})
    found = [refused_field(rules, body) for body in bodies]
    assert found in ([None, None], ["bootstrap_host", "remote_host"])
    return found == [None, None]


def test_a_server_with_keys_names_them_to_no_host_that_only_a_client_has_named():
    keys = {"one": "k"}
    assert all(joined((), keys, host) for host in HERE)
    assert not any(joined((), keys, host) for host in FAR)
    assert all(joined((), {}, host) for host in (*HERE, *FAR)), "without keys there is none to name"


@pytest.mark.parametrize("keys", [{}, {"one": "k"}])
def test_a_server_joins_at_the_hosts_that_its_operator_names_and_at_no_other(keys):
    hosts = ("Prefill-1", "FD00:0::1")
    assert all(joined(hosts, keys, host) for host in ("prefill-1", "PREFILL-1", "fd00::1"))
    assert not any(joined(hosts, keys, host) for host in ("prefill-2", "fd00::2", *HERE))
    rules = DecodeRules(PrefillHosts(frozenset(("a",))))
    with pytest.raises(ApiError, match=r"'b'.*allowed"):
        rules.plan(Rooms(("a", "b"), (1,), (1, 2)), 2)


@pytest.mark.parametrize(
    ("spelt", "named"),
    [("LOCALHOST", "localhost:7"), ("::1", "[::1]:7"), ("0:0:0:0:0:0:0:1", "[::1]:7")],
)
def test_one_server_is_one_peer_however_its_host_is_spelt(spelt, named):
    (session,) = asked_for(ROOM | {"bootstrap_host": spelt}).sessions(1)
    assert session.prefill == named
