"""The play of ``make demo``: who says what, and that histories are what was said."""

from itertools import pairwise

from demo.script import ENCORE, NOTES, PLAY, SYSTEM, Chats, Line, instructions


def test_every_user_has_notes_and_several_turns():
    users = {line.user for line in PLAY}
    assert users == set(NOTES)
    for user in users:
        assert sum(line.user == user for line in PLAY) >= 4


def test_everybody_goes_on_once_after_the_restart():
    assert sorted(line.user for line in ENCORE) == sorted(NOTES)


def test_users_come_back_after_others_and_sometimes_at_once():
    assert any(one.user == two.user for one, two in pairwise(PLAY))
    assert any(one.user != two.user for one, two in pairwise(PLAY))


def test_system_messages_share_their_beginning():
    for user, notes in NOTES.items():
        content = instructions(user)["content"]
        assert content.startswith(SYSTEM)
        assert content.endswith(notes)


def test_a_history_is_what_its_user_has_sent_and_received():
    chats = Chats()
    first, other, second = Line("Ada", "one?"), Line("Ben", "two?"), Line("Ada", "three?")
    asked = chats.asked(first)
    assert asked == [instructions("Ada"), {"role": "user", "content": "one?"}]
    assert chats.answered(first, "1") == 1
    assert chats.asked(other) == [instructions("Ben"), {"role": "user", "content": "two?"}]
    assert chats.answered(other, "2") == 1
    assert chats.asked(second)[1:] == [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "three?"},
    ]
    assert chats.answered(second, "3") == 2
    assert len(asked) == 2  # what was sent is not written to afterwards
