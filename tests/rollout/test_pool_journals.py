"""What the journals between a run and a pool say together, by hand."""

from miles.rollout.pool import Assigned, Inbox, PoolState, in_name, read_state
from miles.rundir import JournalWriter


def assign(number, group, sample, rank=1000):
    return {"kind": "assign", "number": number, "rank": rank, "message": {"kind": "assign", "group": group, "sample": sample, "task": "t"}}


def finished(*numbers, cause=None):
    return {"kind": "finished", "numbers": list(numbers), "cause": cause}


def up(rank, version):
    return {"kind": "up", "rank": rank, "version": version, "url": "http://x", "moved": []}


def fold(*records):
    state = PoolState()
    ended = [a for r in records for a in state.apply(r)]
    return state, ended


def test_what_was_given_and_has_not_ended_runs():
    state, ended = fold({"kind": "beat"}, assign("3.0", 5, 0), assign("3.1", 5, 1, rank=1001), up(1000, 4), finished("3.0"))
    assert state.running == {"3.1": Assigned(5, 1, "t", 1001)} and [a for a, _ in state.done] == ended == [Assigned(5, 0, "t", 1000)]
    assert {rank: r["version"] for rank, r in state.engines.items()} == {1000: 4}


def test_a_sample_that_was_given_again_after_it_failed_runs_whatever_the_order_of_the_two_journals():
    """The run's journals are folded first: both assignments come before the end of the first."""
    state, _ = fold(assign("3.0", 5, 0), assign("3.1", 5, 0), finished("3.0", cause="retried:engine"))
    assert list(state.running) == ["3.1"] and state.done == []


def test_an_end_counts_once_and_an_engine_that_went_down_is_gone():
    state, ended = fold(assign("3.0", 5, 0), finished("3.0"), finished("3.0"), up(1000, 1), up(1001, 2), up(1000, 2), {"kind": "down", "rank": 1001})
    assert ended == [Assigned(5, 0, "t", 1000)]
    assert {rank: r["version"] for rank, r in state.engines.items()} == {1000: 2}


def test_an_older_leader_is_heard_until_a_newer_one_writes(tmp_path):
    old = JournalWriter(tmp_path / in_name(9))
    old.append(assign("9.0", 1, 0))
    inbox = Inbox(tmp_path)
    assert [r["number"] for r in inbox.poll()] == ["9.0"] and inbox.poll() == []
    old.append(assign("9.1", 1, 1))
    new = JournalWriter(tmp_path / in_name(10))
    new.append(assign("10.0", 2, 0))
    assert [r["number"] for r in inbox.poll()] == ["9.1", "10.0"]
    old.append(assign("9.2", 1, 2))  # it is fenced, and does not know yet
    new.append(assign("10.1", 2, 1))
    assert [r["number"] for r in inbox.poll()] == ["10.1"]


def test_the_state_of_a_folder_is_that_of_both_sides(tmp_path):
    JournalWriter(tmp_path / in_name(1)).append(assign("1.0", 1, 0), assign("1.1", 1, 1))
    out = JournalWriter(tmp_path / "out.log")
    out.append(up(1000, 1), finished("1.0"))
    state, reader = read_state(tmp_path)
    assert list(state.running) == ["1.1"] and list(state.engines) == [1000]
    out.append(finished("1.1"))
    assert reader.poll() == [finished("1.1")]
