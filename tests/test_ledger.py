"""Laws of the ledger: nothing is forgotten, nothing is altered, nothing is counted twice."""

import errno
import hashlib
import itertools
import json
import os
import stat
import time
import warnings
from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_dpmuon.accounting import (
    EpsilonBound,
    NoiseEvent,
    SampledGaussian,
    compute_epsilon,
    epsilon_bound,
)
from hf_dpmuon.group_privacy import group_epsilon
from hf_dpmuon.ledger import PrivacyLedger, RunFacts

FACTS = RunFacts(
    delta=1e-5,
    accountant="rdp",
    privacy_unit="image",
    adjacency="add_remove_one",
    guarantee=True,
    num_units=1000,
)
few = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def event(step, sigma=1.1, q=0.02, digest=None):
    return NoiseEvent(
        step=step,
        noise_multiplier=sigma,
        sample_rate=q,
        max_grad_norm=1.0,
        clipping="flat",
        digest=digest or f"{step:064x}",
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "privacy_ledger.jsonl"


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """Tests of other laws need not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def write(path, events=(), facts=FACTS):
    path.unlink(missing_ok=True)
    ledger = PrivacyLedger.create(path)
    ledger.open_run(facts)
    for e in events:
        ledger.record(e)
    return ledger


def same(a, b):
    return (a.head, a.runs, a.events, a.accounted) == (b.head, b.runs, b.events, b.accounted)


# Epsilon


@few
@given(
    st.lists(
        st.tuples(st.sampled_from([0.9, 2.0]), st.sampled_from([0.01, 1.0]), st.integers(1, 20)),
        max_size=5,
    )
)
def test_epsilon_is_that_of_the_accountant(path, segments):
    mechanisms = [(sigma, q) for sigma, q, steps in segments for _ in range(steps)]
    ledger = write(path, [event(i, *m) for i, m in enumerate(mechanisms, start=1)])
    expected = epsilon_bound([SampledGaussian(*m) for m in segments], delta=1e-5)
    for each in (ledger, PrivacyLedger.load(path)):
        assert each.epsilon() == expected
        assert len(each) == len(mechanisms)
    folded = ledger.accounted
    assert all(
        (a.noise_multiplier, a.sample_rate) != (b.noise_multiplier, b.sample_rate)
        for a, b in itertools.pairwise(folded)
    )


def test_epsilon_of_equal_events_equals_compute_epsilon(path):
    ledger = write(path, [event(i) for i in range(1, 51)])
    kwargs = {"noise_multiplier": 1.1, "sample_rate": 0.02, "steps": 50}
    assert ledger.epsilon() == EpsilonBound(compute_epsilon(**kwargs, delta=1e-5), "rdp")
    assert ledger.epsilon_at(1e-3).epsilon == compute_epsilon(**kwargs, delta=1e-3)
    assert ledger.accounted == [SampledGaussian(1.1, 0.02, 50)]


@few
@given(st.lists(st.sampled_from([0.9, 2.0]), min_size=1, max_size=12))
def test_epsilon_after_some_draws_is_that_of_the_ledger_at_that_time(path, sigmas):
    ledger = write(path)
    past = [ledger.epsilon()]
    for step, sigma in enumerate(sigmas, start=1):
        ledger.record(event(step, sigma))
        past.append(ledger.epsilon())
    assert [ledger.epsilon_after(draws) for draws in range(len(sigmas) + 1)] == past
    for draws in (-1, len(sigmas) + 1):
        with pytest.raises(ValueError, match=rf"draws={draws} must be in \[0, {len(sigmas)}\]"):
            ledger.epsilon_after(draws)


def test_a_groups_epsilon_is_that_of_the_accountant(path):
    ledger = write(path, [event(1), event(2)])
    assert ledger.group_epsilon(1) == ledger.epsilon().epsilon
    assert ledger.group_epsilon(4) == group_epsilon(
        [SampledGaussian(1.1, 0.02, 2)], group_size=4, delta=1e-5
    )


def test_the_last_run_says_which_delta_and_accountant(path):
    ledger = write(path, [event(1)])
    ledger.open_run(replace(FACTS, delta=1e-6, accountant="prv"))
    ledger.record(event(2))
    both = [SampledGaussian(1.1, 0.02, 2)]
    assert ledger.epsilon() == epsilon_bound(both, delta=1e-6, accountant="prv")


def test_no_noise_is_no_privacy(path):
    ledger = write(path, [event(1)])
    assert ledger.guarantee
    ledger.record(event(2, sigma=0.0))
    assert ledger.epsilon().epsilon == float("inf")
    assert not ledger.guarantee
    assert not PrivacyLedger.load(path).guarantee


def test_one_run_without_guarantee_voids_the_whole(path):
    ledger = write(path, facts=replace(FACTS, guarantee=False))
    ledger.open_run(FACTS)
    assert not ledger.guarantee


def test_an_empty_ledger_claims_nothing(path):
    ledger = PrivacyLedger.create(path)
    assert not ledger.guarantee
    with pytest.raises(ValueError, match="no run is open"):
        ledger.epsilon()
    with pytest.raises(ValueError, match="no run is open"):
        ledger.record(event(1))
    assert path.read_bytes() == b""


def test_asking_after_every_record_is_cheap(path):
    ledger = write(path, [event(1)])
    ledger.epsilon()
    start = time.process_time()
    for step in range(2, 1002):
        ledger.record(event(step))
        ledger.epsilon()
    assert (time.process_time() - start) / 1000 < 2e-3


# Counting


def test_every_record_counts_also_one_that_looks_like_another(path):
    # Two empty draws at one step of two passes are equal in every value, and are two releases.
    ledger = write(path, [event(1), event(2), event(2)])
    assert len(ledger) == len(PrivacyLedger.load(path)) == 3
    assert ledger.epsilon() == write(path, [event(1), event(2), event(3)]).epsilon()


# Tampering


def test_loading_gives_back_what_was_written(path):
    ledger = write(path, [event(1), event(2, sigma=2.0)])
    ledger.open_run(replace(FACTS, delta=1e-6))
    ledger.record(event(3))
    loaded = PrivacyLedger.load(path)
    assert same(loaded, ledger)
    loaded.record(event(4))
    assert len(PrivacyLedger.load(path)) == 4


@settings(few, max_examples=300)
@given(st.data())
def test_a_changed_byte_is_refused_or_is_a_torn_last_line(path, data):
    events = write(path, [event(i) for i in range(1, 4)]).events
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    number = 1 + content[:position].count(b"\n")
    content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded, message = PrivacyLedger.load(path), ""
        except ValueError as error:
            loaded, message = None, str(error)
    if loaded is None:
        assert f"line {number} of" in message
    else:
        assert number == 4
        assert loaded.events == events[:-1]


@pytest.mark.parametrize("number", range(4))
def test_a_missing_line_is_refused(path, number):
    write(path, [event(i) for i in range(1, 5)])
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[number]
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=rf"line {number + 1} of .* no epsilon can be reported"):
        PrivacyLedger.load(path)


@pytest.mark.parametrize(
    "edit",
    [
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        lambda lines: [*lines[:3], lines[2], *lines[3:]],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [lines[0], b"\n", *lines[1:]],
        lambda lines: [lines[0].replace(b":", b": ", 1), *lines[1:]],
        lambda lines: [*lines[:2], b"[]\n", *lines[2:]],
    ],
    ids=["moved", "repeated", "repeated at the end", "blank", "reformatted", "inserted"],
)
def test_an_edited_ledger_is_refused(path, edit):
    write(path, [event(i) for i in range(1, 5)])
    path.write_bytes(b"".join(edit(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=r"line . of"):
        PrivacyLedger.load(path)


def test_a_record_rewritten_with_more_noise_is_refused(path):
    write(path, [event(1), event(2)])
    lines = path.read_text().splitlines()
    forged = json.loads(lines[-1]) | {"noise_multiplier": 100.0}
    lines[-1] = json.dumps(forged, sort_keys=True, separators=(",", ":"))
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="line 3 of"):
        PrivacyLedger.load(path)


# Runs


def test_runs_know_how_many_draws_they_made(path):
    assert PrivacyLedger.create(path).draws_per_run == ()
    ledger = write(path, [event(1), event(2)])
    ledger.open_run(FACTS)
    assert ledger.draws_per_run == (2, 0)
    ledger.record(event(3))
    assert ledger.draws_per_run == PrivacyLedger.load(path).draws_per_run == (2, 1)


def by_hand(path, runs):
    """A ledger whose chain is right, whatever its runs say; as another version might write it."""
    chain, lines = "0" * 64, []
    for facts in runs:
        content = {"kind": "run", **facts}
        body = json.dumps(content, sort_keys=True, separators=(",", ":"))
        chain = hashlib.sha256((chain + body).encode()).hexdigest()
        lines.append(
            json.dumps({**content, "chain": chain}, sort_keys=True, separators=(",", ":")) + "\n"
        )
    path.write_text("".join(lines))


OPTIONAL = ("largest_group", "group_name", "max_examples_per_unit")


def test_a_ledger_from_before_groups_were_recorded_loads_and_goes_on(path):
    old = {name: value for name, value in asdict(FACTS).items() if name not in OPTIONAL}
    by_hand(path, [old])
    ledger = PrivacyLedger.load(path)
    assert ledger.runs == (FACTS,)
    ledger.open_run(replace(FACTS, largest_group=12, group_name="patient"))
    assert same(PrivacyLedger.load(path), ledger)
    assert ledger.runs[-1].largest_group == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"privacy_unit": "patient"}, "privacy_unit='patient' must be 'image'"),
        ({"adjacency": "replace_one"}, "adjacency='replace_one' must be 'add_remove_one'"),
    ],
)
def test_draws_on_different_units_are_not_added_up(path, change, message):
    ledger = write(path, [event(1)])
    content = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        ledger.open_run(replace(FACTS, **change))
    assert path.read_bytes() == content
    assert same(PrivacyLedger.load(path), ledger)
    by_hand(path, [asdict(FACTS), asdict(FACTS)])
    assert len(PrivacyLedger.load(path).runs) == 2
    by_hand(path, [asdict(FACTS), asdict(FACTS) | change])
    with pytest.raises(ValueError, match=message):
        PrivacyLedger.load(path)


# Crashes


def test_a_crash_at_any_byte_of_the_last_record_loses_only_that_record(path):
    before = write(path, [event(1), event(2)])
    whole = len(path.read_bytes())
    after = write(path, [event(1), event(2), event(3)])
    content = path.read_bytes()
    for end in range(whole + 1, len(content)):
        path.write_bytes(content[:end])
        with pytest.warns(UserWarning, match=r"line 4 of .* is torn"):
            ledger = PrivacyLedger.load(path)
        assert same(ledger, before)
        assert len(path.read_bytes()) == end
        ledger.record(event(3))
        assert path.read_bytes() == content
        assert same(ledger, after)


def test_a_full_disk_counts_nothing_and_leaves_no_trace(path, monkeypatch):
    ledger = write(path, [event(1)])
    content, spent = path.read_bytes(), ledger.epsilon()
    real_write = os.write

    def nearly_full(descriptor, data):
        if len(data) < 200:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, data[:100])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", nearly_full)
        with pytest.raises(OSError, match="No space left"):
            ledger.record(event(2))
        with pytest.raises(OSError, match="No space left"):
            ledger.open_run(FACTS)
    assert path.read_bytes() == content
    assert (ledger.epsilon(), len(ledger), len(ledger.runs)) == (spent, 1, 1)
    ledger.record(event(2))
    assert same(PrivacyLedger.load(path), ledger)


def test_a_record_is_synced_before_it_counts(path, monkeypatch):
    ledger = write(path)
    synced = []

    def fsync(descriptor):
        synced.append((os.fstat(descriptor).st_size, len(ledger)))

    monkeypatch.setattr(os, "fsync", fsync)
    ledger.record(event(1))
    assert synced == [(path.stat().st_size, 0)]


def test_two_writers_are_noticed(path):
    first = write(path, [event(1)])
    second = PrivacyLedger.load(path)
    first.record(event(2))
    with pytest.raises(RuntimeError, match="another run"):
        second.record(event(2, digest="f" * 64))
    assert len(PrivacyLedger.load(path)) == 2


# Files


def test_a_ledger_is_not_overwritten_and_private(path):
    write(path, [event(1)])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="resume that run or choose another output folder"):
        PrivacyLedger.create(path)
    assert len(PrivacyLedger.load(path)) == 1


def test_a_copy_is_the_ledger_and_its_past(path, tmp_path):
    ledger = write(path, [event(1)])
    copy = tmp_path / "checkpoint.jsonl"
    copy.write_text("an older one")
    ledger.copy_to(copy)
    past = PrivacyLedger.load(copy)
    assert same(past, ledger)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    ledger.record(event(2))
    assert ledger.extends(past)
    assert ledger.extends(ledger)
    assert not past.extends(ledger)
    past.record(event(2, digest="f" * 64))
    assert not ledger.extends(past)
    assert sorted(p.name for p in tmp_path.iterdir()) == [copy.name, path.name]


def test_a_copy_that_fails_leaves_the_old_one(path, tmp_path, monkeypatch):
    ledger = write(path, [event(1)])
    copy = tmp_path / "checkpoint.jsonl"
    copy.write_text("an older one")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        ledger.copy_to(copy)
    assert copy.read_text() == "an older one"
    assert sorted(p.name for p in tmp_path.iterdir()) == [copy.name, path.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": 0.0}, "delta=0.0"),
        ({"accountant": "gdp"}, "accountant='gdp'"),
        ({"num_units": 0}, "num_units=0"),
        ({"largest_group": 0}, "largest_group=0 must be >= 1"),
        ({"max_examples_per_unit": 0}, "max_examples_per_unit=0 must be >= 1"),
    ],
)
def test_facts_outside_their_range_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        replace(FACTS, **change)


def test_a_draw_outside_its_range_is_not_written(path):
    ledger = write(path)
    with pytest.raises(ValueError, match="sample_rate=2"):
        ledger.record(event(1, q=2.0))
    assert len(PrivacyLedger.load(path)) == 0
