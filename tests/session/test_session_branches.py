"""Sessions that branch: one trajectory for each kept conversation, every sampled token trained once, also after a way through the buffer."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.buffer import read_group
from miles.buffer.storage import write_part_file
from miles.core import EnvironmentFault, StructureError
from miles.session import (
    Checkpoint,
    Engine,
    Engines,
    History,
    SessionService,
    SessionStore,
    to_trajectories,
)
from tests.buffer.parts import seal_parts
from tests.session.conftest import user
from tests.session.fake import finish, leaves, open_session
from tests.session.test_session_assemble import turn
from tests.session.test_session_tools import TOOLS


def checkpoint(question, t, cacheable=0, reused=0):
    return Checkpoint((user(question),), {"role": "assistant", "content": "a"}, t, cacheable_tokens=cacheable, reused_tokens=reused)


def grow(*branches):
    """A branching history of (turn that is gone on from, checkpoint)."""
    history = History(branching=True)
    for head, c in branches:
        history = replace(history, head=head).add(c)
    return history


def trajectories(history, opened_at=1):
    return to_trajectories(history, group_id=7, sample=3, task_id="t", reward=0.5, finish_reason="done", opened_at=opened_at, seconds=2.0, meta={"env_s": 1.0})


# t1 = [1 2 | 10 11], t2 = [t1 3 | 12], t3 = [t2 4 | 13 14]; and from t1 again t2' = [t1 5 6 | 15]
T1 = checkpoint("q", replace(turn([1, 2], [10, 11]), cached_tokens=1))
T2 = checkpoint("left", replace(turn([1, 2, 10, 11, 3], [12], start=3), cached_tokens=3), cacheable=3, reused=3)
T3 = checkpoint("on", replace(turn([1, 2, 10, 11, 3, 12, 4], [13, 14], start=5), cached_tokens=5), cacheable=5, reused=5)
FORK = checkpoint("right", replace(turn([1, 2, 10, 11, 5, 6], [15], start=3), cached_tokens=2), cacheable=4, reused=2)


def test_a_fork_at_the_second_of_three_turns_by_hand():
    a, b = trajectories(grow((-1, T1), (0, T2), (1, T3), (0, FORK)))
    assert (a.leaf, b.leaf) == (0, 1)
    assert a.tokens.tolist() == [1, 2, 10, 11, 3, 12, 4, 13, 14] and a.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 0, 1, 1]
    assert b.tokens.tolist() == [1, 2, 10, 11, 5, 6, 15] and b.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert a.versions.tolist() == [-1, -1, 1, 1, -1, 1, -1, 1, 1] and b.versions.tolist() == [-1, -1, -1, -1, -1, -1, 1]
    assert a.logprobs.tolist() == np.array([0, 0, -0.10, -0.11, 0, -0.12, 0, -0.13, -0.14], np.float32).tolist()
    assert b.logprobs.tolist() == np.array([0, 0, 0, 0, 0, 0, -0.15], np.float32).tolist()
    assert a.routes[:, 0, 0].tolist() == [1, 2, 2, 3, 3, 4, 4, 5] and b.routes[:, 0, 0].tolist() == [1, 2, 2, 3, 5, 6]  # of given tokens too
    # a turn counts in the leaf that trains it: prompts of 2, 5 and 7 tokens, and one of 6
    assert [(t.turns, t.prompt_tokens, t.cached_tokens, t.cacheable_tokens, t.meta["reused_tokens"]) for t in (a, b)] == [(3, 14, 9, 8, 8), (1, 6, 2, 4, 2)]
    assert {(t.group_id, t.sample, t.reward, t.finish_reason, t.seconds, t.meta["env_s"], t.exact) for t in (a, b)} == {(7, 3, 0.5, "done", 2.0, 1.0, True)}


def test_the_leaf_that_was_answered_first_trains_what_is_shared():
    fork, long = trajectories(grow((-1, T1), (0, FORK), (0, T2), (2, T3)))
    assert (fork.turns, fork.loss_mask.tolist()) == (2, [0, 0, 1, 1, 0, 0, 1])
    assert (long.turns, long.loss_mask.tolist()) == (2, [0, 0, 0, 0, 0, 1, 0, 1, 1])


def test_a_folded_context_is_a_second_root_and_shares_nothing():
    folded = checkpoint("summary", turn([1, 9, 9], [20]))
    a, b = trajectories(grow((-1, T1), (0, T2), (-1, folded)))
    assert (a.tokens.tolist(), a.loss_mask.tolist(), a.turns) == ([1, 2, 10, 11, 3, 12], [0, 0, 1, 1, 0, 1], 2)
    assert (b.tokens.tolist(), b.loss_mask.tolist(), b.turns, b.prompt_tokens) == ([1, 9, 9, 20], [0, 0, 0, 1], 1, 3)


def test_a_leaf_is_exact_only_if_the_shared_tokens_that_it_does_not_train_are():
    across = checkpoint("q", turn([1, 2], [10, 11], versions=[1, 2]))
    a, b = trajectories(grow((-1, across), (0, T2), (0, FORK)))
    assert set(b.versions[b.loss_mask == 1].tolist()) == {1} and (a.exact, b.exact) == (False, False)
    later = checkpoint("right", turn([1, 2, 10, 11, 5, 6], [15], version=2, start=3))
    a, b = trajectories(grow((-1, T1), (0, T2), (0, later)))
    assert (a.exact, b.exact) == (True, False)


# -- through a session --------------------------------------------------------------------------------------------------------
def fork(s, stop):
    """t1, t2, t3, then t2' from t1, then a folded context; returns the replies."""
    r1 = s.ask([user("q")], [50, stop]).message
    r2 = s.ask([user("q"), r1, user("left")], [51, stop]).message
    s.ask([user("q"), r1, user("left"), r2, user("on")], [52, stop])
    s.ask([user("q"), r1, user("right")], [53, 54, stop])
    return s.ask([user("a summary"), user("go on")], [55, stop])


def test_a_harness_that_forks_and_folds_gets_a_trajectory_for_each_conversation(chat):
    s, stop = open_session(chat, branching=True), chat.stop_ids[0]
    fork(s, stop)
    sent = s.engine.answered
    got = leaves(s.session)
    assert [t.tokens.tolist() for t in got] == [[*sent[i].input_ids, *sent[i].output_ids] for i in (2, 3, 4)]
    assert [t.tokens[t.loss_mask == 1].tolist() for t in got] == [[50, stop, 51, stop, 52, stop], [53, 54, stop], [55, stop]]
    assert [t.turns for t in got] == [3, 1, 1] and sum(t.prompt_tokens for t in got) == sum(len(t.input_ids) for t in sent)
    # the fork finds all of t1 computed, and what the template writes before both questions; the fold finds what every prompt of it begins with
    shared = [len(sent[0].input_ids) + 2, len(sent[1].input_ids) - 1]
    assert shared[0] <= got[1].cacheable_tokens <= shared[1]
    assert 0 < got[2].cacheable_tokens < len(sent[0].input_ids)


def test_a_branch_that_is_gone_back_to_is_still_in_the_cache(chat):
    s, stop = open_session(chat, branching=True), chat.stop_ids[0]
    fork(s, stop)
    held = s.session.history.path(2)
    conversation = [m for i in held for m in s.session.history.nodes[i].messages]
    s.ask([*conversation, user("more")], [56, stop])  # behind the last turn before the fork and the fold
    assert s.session.history.nodes[-1].parent == 2 and s.session.history.nodes[-1].cacheable_tokens == len(s.session.history.nodes[2].tokens) - 1


def test_branches_and_refusals_are_counted_by_the_same_causes(chat):
    stop = chat.stop_ids[0]
    branching, linear = open_session(chat, branching=True), open_session(chat)
    for s in (branching, linear):
        r1 = s.ask([user("q")], [50, stop]).message
        r2 = s.ask([user("q"), r1, user("left")], [51, stop]).message
        for request in ([user("other")], [user("q"), {**r1, "content": "changed"}, user("left"), r2, user("on")]):
            try:
                s.ask(request, [60, stop])
            except StructureError as e:
                assert s is linear and e.cause == "history:content"
    assert branching.session.branched == {"content": 2} and not branching.session.refused
    assert linear.session.refused == {"history:content": 2} and not linear.session.branched
    (t,) = leaves(linear.session)
    assert t.meta["refused_requests"] == {"history:content": 2} and t.meta["branched_requests"] == {}
    assert [t.meta["branched_requests"] for t in leaves(branching.session)] == [{"content": 2}] * 3
    with pytest.raises(StructureError):
        branching.ask([user("q"), r1], [60, stop])
    assert branching.session.refused == {"history:nothing-appended": 1} and branching.session.branched == {"content": 2}


def test_a_branch_without_an_answer_is_not_counted(chat):
    s, stop = open_session(chat, branching=True), chat.stop_ids[0]
    s.ask([user("q")], [50, stop])
    s.engine.fail = True
    with pytest.raises(EnvironmentFault):
        s.ask([user("other")], [51, stop])
    assert not s.session.branched and finish(s.session).turns == 1


def test_each_root_has_its_own_tools_for_all_its_branches(chat):
    s, stop = open_session(chat, branching=True), chat.stop_ids[0]
    main = s.ask([user("q")], [50, stop], tools=TOOLS).message
    sub = s.ask([user("a task of its own")], [51, stop]).message  # a sub-agent without tools
    s.ask([user("a task of its own"), sub, user("more")], [52, stop])
    s.ask([user("q"), main, user("its result")], [53, stop], tools=TOOLS)
    with pytest.raises(StructureError) as e:
        s.ask([user("q"), main, user("another result")], [54, stop])
    assert e.value.cause == "history:tools" and [t.turns for t in leaves(s.session)] == [2, 2]


def test_one_engine_after_another_knows_nothing_of_the_branches_before(chat):
    s, stop = open_session(chat, branching=True), chat.stop_ids[0]
    r1 = s.ask([user("q")], [50, stop]).message
    s.ask([user("q"), r1, user("left")], [51, stop])
    s.service.engines.up(Engine(0, s.engine))  # another incarnation
    s.ask([user("q"), r1, user("right")], [52, stop])
    s.ask([user("q"), r1, user("left")], [53, stop])
    assert [c.cacheable_tokens > 0 for c in s.session.history.nodes] == [False, True, False, True]


def test_a_server_that_was_killed_continues_every_branch_of_a_session(chat, tmp_path):
    """Durable: t1, two branches of it and a second root with tools of its own are on disk; the next process goes on from each."""
    stop = chat.stop_ids[0]
    s = open_session(chat, branching=True)

    def service(epoch):
        return SessionService(Engines.of(s.engine), chat, s.service.limits, branching=True, store=SessionStore(tmp_path / "sessions", 0, epoch))

    async def ask(session, messages, output, tools=None):
        s.engine.outputs = [[*output, stop]]
        return (await session.chat(messages, tools=tools)).message

    async def before():
        session = await service(1).open_durable("key", "id")
        r1 = await ask(session, [user("q")], [50])
        left = await ask(session, [user("q"), r1, user("left")], [51])
        await ask(session, [user("q"), r1, user("right")], [52])
        sub = await ask(session, [user("a task")], [53], TOOLS)
        return session, r1, left, sub

    async def after(r1, left, sub):
        session = service(2).sessions["id"]
        await ask(session, [user("q"), r1, user("left"), left, user("on")], [54])
        await ask(session, [user("a task"), sub, user("on")], [55], TOOLS)
        with pytest.raises(StructureError) as e:
            await ask(session, [user("a task"), sub, user("on")], [56])
        assert e.value.cause == "history:tools"
        return session

    first, *replies = asyncio.run(before())
    figures = [(c.parent, c.appended, c.cacheable_tokens, c.turn.output_ids.tolist()) for c in first.history.nodes]
    branched = dict(first.branched)
    second = asyncio.run(after(*replies))
    assert [(c.parent, c.appended, c.cacheable_tokens, c.turn.output_ids.tolist()) for c in second.history.nodes[:4]] == figures
    assert branched == {"content": 2} and second.branched == {"content": 4} and [c.parent for c in second.history.nodes[4:]] == [1, 3]
    got = leaves(second)
    assert [t.tokens[t.loss_mask == 1].tolist() for t in got] == [[50, stop, 52, stop], [51, stop, 54, stop], [53, stop, 55, stop]]
    assert [t.turns for t in got] == [2, 2, 2] and second.history.nodes[4].cacheable_tokens == 0  # the cache of the engine before is gone


# -- through the buffer -------------------------------------------------------------------------------------------------------
outputs = st.lists(st.integers(30, 300), min_size=1, max_size=4)
moves = st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["go on", "go on", "go on", "again", "fold"]), outputs, st.booleans()), min_size=1, max_size=9)


@settings(deadline=None, max_examples=60)
@given(samples=st.lists(moves, min_size=2, max_size=3))
def test_random_trees_train_every_sampled_token_of_the_kept_conversations_once_also_from_the_buffer(chat, tmp_path_factory, samples):
    """A harness that goes on from any of its conversations, asks again, or folds; some turns are cut by length."""
    folder = tmp_path_factory.mktemp("buffer")
    (folder / "parts").mkdir()
    (folder / "groups").mkdir()
    sessions = []
    for number, steps in enumerate(samples):
        s = open_session(chat, branching=True)
        requests, conversations = [], []
        for n, (origin, move, output, cut) in enumerate(steps):
            if not conversations or move == "fold":
                request = [user(f"fold {n}")]
            elif move == "again":
                request = requests[origin % n]
            else:
                request = [*conversations[origin % n], user(f"u{n}")]
            answer = s.ask(request, output if cut else [*output, chat.stop_ids[0]])
            requests.append(request)
            conversations.append([*request, answer.message])
        made = s.session.trajectories(group_id=5, sample=number, task_id="t", reward=float(number), finish_reason="done")
        write_part_file(folder, made)
        sessions.append((s, made))
    stored = read_group(folder, seal_parts(folder, 5, list(range(len(samples))))).trajectories
    assert [(t.sample, t.leaf) for t in stored] == [(t.sample, t.leaf) for _, made in sessions for t in made]
    for number, (s, _) in enumerate(sessions):
        history, recorded = s.session.history, s.engine.answered
        mine = [t for t in stored if t.sample == number]
        times = dict.fromkeys(range(len(recorded)), 0)
        for leaf, t in zip(history.leaves(), mine, strict=True):
            last = recorded[leaf]
            assert t.tokens.tolist() == [*last.input_ids, *last.output_ids] and t.tokens.dtype == np.int32
            assert t.routes[:, 0, 0].tolist() == [x % 8 for x in t.tokens[:-1]]
            rest = t.loss_mask.copy()
            for i in history.path(leaf):
                span = slice(len(recorded[i].input_ids), len(recorded[i].input_ids) + len(recorded[i].output_ids))
                (trained,) = set(t.loss_mask[span].tolist())
                times[i] += trained
                rest[span] = 0
                assert t.logprobs[span].tolist() == [p * trained for p in recorded[i].logprobs.tolist()]
                assert t.versions[span].tolist() == [0 if trained else -1] * len(recorded[i].output_ids)
            assert not rest.any() and not t.logprobs[t.loss_mask == 0].any()
        kept = {i for leaf in history.leaves() for i in history.path(leaf)}
        assert times == {i: int(i in kept) for i in range(len(recorded))}
        assert sum(t.turns for t in mine) == len(kept) and sum(t.prompt_tokens for t in mine) == sum(len(recorded[i].input_ids) for i in kept)
