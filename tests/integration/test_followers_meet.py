"""Where the ranks that a server starts on its machine meet: at a port that is theirs before any of
them is started."""

import socket

import pytest

from stratakv.agreement.torch_ranks import join
from stratakv.serve.followers import Followers


def test_the_port_at_which_ranks_meet_is_nobody_else_s_from_the_start():
    with Followers(["--version"], 1) as followers:
        place = followers.place
        port = int(place.address.rpartition(":")[2])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        ranks = join(0, 1, place.address, 5.0, place.listener)
        assert ranks.gather("alone") == ["alone"]
        ranks.close()


def test_where_ranks_have_not_met_the_port_is_free_again():
    with Followers(["--version"], 1) as followers:
        port = int(followers.place.address.rpartition(":")[2])
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
