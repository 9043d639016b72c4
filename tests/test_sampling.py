"""Laws of the Poisson draws, their secret generator, and the loader that cuts them up."""

import math
import random
import tracemalloc
import unicodedata

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hf_dpmuon.randomness import keyed_generator, new_key
from hf_dpmuon.sampling import LogicalBatchLoader, PoissonSampler
from hf_dpmuon.units import PrivacyUnits, canonical_id

few = settings(max_examples=40, deadline=None, derandomize=True)


def sampler(num_units, sample_rate):
    return PoissonSampler(num_units, sample_rate=sample_rate)


def generator_of(seed=0):
    """Generators of numbered draws, from a fixed key."""
    return lambda number: keyed_generator(new_key(seed), str(number).encode())


class EchoDataset:
    """Returns its key, so that a batch shows what was asked for."""

    def __getitem__(self, key):
        return key


def loader(
    num_units=100, sample_rate=0.05, *, seed=0, size=4, num_batches=6, num_workers=0, first_draw=1
):
    return LogicalBatchLoader(
        EchoDataset(),
        sampler=sampler(num_units, sample_rate),
        generator_of=generator_of(seed),
        first_draw=first_draw,
        physical_batch_size=size,
        collate_fn=list,
        num_batches=num_batches,
        num_workers=num_workers,
    )


@pytest.fixture(autouse=True)
def no_worker_is_left(monkeypatch):
    """A loader that nobody closes waits seconds for its workers when it is collected."""
    made = []
    start = LogicalBatchLoader.__init__

    def noted(self, *args, **kwargs):
        start(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(LogicalBatchLoader, "__init__", noted)
    yield
    for each in made:
        each.close()


def keys_of(batches):
    """Per logical batch, its keys in order."""
    return [[key for physical in batch for key in physical.inputs] for batch in batches]


# The generator


def test_torch_forgets_half_of_a_seed_and_ours_does_not():
    """The reason why the secret generator is not torch's."""
    short, long = 5, 2**32 + 5
    torch_bits = [
        torch.randn(64, generator=torch.Generator().manual_seed(s)) for s in (short, long)
    ]
    assert torch.equal(*torch_bits)
    ours = [keyed_generator(new_key(s)).standard_normal(64) for s in (short, long)]
    assert not np.array_equal(*ours)


def test_keys_of_the_operating_system_differ_and_have_256_bits():
    keys = [new_key() for _ in range(64)]
    assert len(set(keys)) == 64
    assert {len(key) for key in keys} == {32}
    ever_set = int.from_bytes(bytes(32), "big")
    for key in keys:
        ever_set |= int.from_bytes(key, "big")
    assert ever_set == 2**256 - 1  # a mutant of 32 bits fails; 64 keys miss one with 2^-56


def test_a_stream_depends_on_every_bit_of_its_key_and_on_its_use():
    keys = [bytes(32), *((1 << bit).to_bytes(32, "big") for bit in range(256))]
    streams = {keyed_generator(key, use).bytes(16) for key in keys for use in (b"1", b"2")}
    assert len(streams) == 2 * len(keys)


def test_global_seeds_do_not_matter_and_global_generators_are_not_touched():
    outcomes = []
    for seed in (1, 2):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        outcomes.append(keys_of(loader()))
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        assert before[:2] == after[:2]
        assert torch.equal(before[2], after[2])
    assert outcomes[0] == outcomes[1]


# The draws


@few
@given(st.integers(1, 300), st.floats(1e-12, 1), st.integers(0, 2**64))
def test_a_draw_is_sorted_distinct_and_in_range(num_units, rate, seed):
    poisson, generator = sampler(num_units, rate), generator_of(seed)(1)
    for _ in range(3):
        units = poisson.draw(generator)
        assert units.dtype == np.int64
        assert (np.diff(units) > 0).all()
        assert units.size == 0 or (units[0] >= 0 and units[-1] < num_units)


@pytest.mark.parametrize("num_units", [1, 2, 1000])
def test_rate_one_draws_everybody(num_units):
    assert np.array_equal(sampler(num_units, 1.0).draw(generator_of()(1)), np.arange(num_units))


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.34, 0.9])
def test_units_are_drawn_at_the_rate_and_independently(rate):
    """Frequencies of units (chi-square), of pairs of units, and the spread of the sizes.

    Both of numpy's geometric methods are covered: they change at 1/3.
    """
    num_units, num_draws = 40, 6000
    poisson, generator = sampler(num_units, rate), generator_of()(1)
    joined = np.zeros((num_draws, num_units))
    for row in joined:
        row[poisson.draw(generator)] = 1

    def spread(observed, probability):  # z-scores, standard normal under the law
        sd = np.sqrt(num_draws * probability * (1 - probability))
        return (observed - num_draws * probability) / sd

    per_unit = spread(joined.sum(axis=0), rate)
    assert 1e-4 < stats.chi2.sf((per_unit**2).sum(), num_units) < 1 - 1e-4
    pairs = (joined.T @ joined)[np.triu_indices(num_units, 1)]
    assert np.abs(spread(pairs, rate**2)).max() < 5
    from_one_draw_to_the_next = (joined[1:] * joined[:-1]).sum(axis=0)
    assert np.abs(spread(from_one_draw_to_the_next, rate**2)).max() < 5
    sizes = joined.sum(axis=1)
    assert sizes.var() == pytest.approx(num_units * rate * (1 - rate), rel=0.1)


def test_one_unit_is_a_coin():
    poisson, generator = sampler(1, 0.25), generator_of()(1)
    heads = sum(len(poisson.draw(generator)) for _ in range(4000))
    assert abs(heads - 1000) < 5 * np.sqrt(750)


def test_a_draw_from_ten_million_takes_the_memory_of_its_members():
    poisson, generator = sampler(10_000_000, 1e-3), generator_of()(1)
    tracemalloc.start()
    units = poisson.draw(generator)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 9_000 < len(units) < 11_000
    assert peak < 10 * 8 * len(units)


# The loader


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_physical_size_cuts_a_draw_and_changes_nothing(size, num_workers):
    whole = keys_of(loader(500, 0.1, size=10**6))
    cut = []
    for batch in loader(500, 0.1, size=size, num_workers=num_workers):
        physical = [part.inputs for part in batch]
        rows = [key for part in physical for key in part]
        assert len(physical) == -(-len(rows) // size)
        assert all(len(part) == size for part in physical[:-1])
        cut.append(rows)
    assert cut == whole
    assert all(len({row for row, _ in rows}) == len(rows) for rows in cut)


def test_augmentation_seeds_are_fresh_63_bit_numbers():
    seeds = [seed for keys in keys_of(loader(1000, 0.5)) for _, seed in keys]
    assert len(set(seeds)) == len(seeds) > 2000
    assert 2**61 < max(seeds) < 2**63
    assert min(seeds) >= 0
    assert np.mean([seed & 1 for seed in seeds]) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_empty_draws_are_logical_batches_without_physical_ones(num_workers):
    batches = loader(5, 1e-9, num_batches=5, num_workers=num_workers)
    assert keys_of(batches) == [[]] * 5
    mixed = keys_of(loader(10, 0.1, num_batches=40, num_workers=num_workers))
    assert 5 < mixed.count([]) < 30
    assert mixed == keys_of(loader(10, 0.1, num_batches=40))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("sample_rate", [0.05, 0.005])
def test_a_resumed_stream_is_the_uninterrupted_one(num_workers, sample_rate):
    """The next draw follows the last one handed out, however far the workers have run ahead."""
    whole = keys_of(loader(100, sample_rate, num_batches=12))
    first = loader(100, sample_rate, num_batches=12, num_workers=num_workers)
    stream = iter(first)
    start = [keys_of([next(stream)])[0] for _ in range(5)]
    rest = loader(100, sample_rate, num_batches=7, num_workers=num_workers, first_draw=6)
    assert start + keys_of(rest) == whole
    first.close()
    assert start + keys_of(first)[:7] == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_stream_goes_on_across_epochs_and_epochs_left_early(num_workers):
    whole = keys_of(loader(num_batches=9))
    epochs = loader(num_batches=3, num_workers=num_workers)
    assert len(epochs) == 3
    seen = keys_of(epochs)
    for batch in epochs:
        seen += keys_of([batch])
        break
    seen += keys_of(epochs)
    seen += keys_of(epochs)
    assert seen[:9] == whole


def test_a_batch_must_be_used_up_and_only_once():
    stream = iter(loader(100, 0.5))
    batch = next(stream)
    next(iter(batch))
    with pytest.raises(RuntimeError, match="only once"):
        iter(batch)
    with pytest.raises(RuntimeError, match="not iterated to its end"):
        next(stream)


def test_a_batch_does_not_tell_its_size():
    small, large = (next(iter(loader(1000, rate))) for rate in (0.01, 0.9))
    assert repr(small).split(" at ")[0] == repr(large).split(" at ")[0]
    with pytest.raises(TypeError):
        len(small)


# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sampler(0, 0.5), "num_units=0 must be >= 1"),
        (lambda: sampler(5, 0.0), r"sample_rate=0.0 must be in \(0, 1\]"),
        (lambda: sampler(5, 1.1), r"sample_rate=1.1 must be in \(0, 1\]"),
        (lambda: sampler(5, float("nan")), "sample_rate=nan"),
        (lambda: loader(size=0), "physical_batch_size=0 must be >= 1"),
        (lambda: loader(num_batches=0), "num_batches=0 must be >= 1"),
        (lambda: new_key(-1), "seed=-1 must be in"),
    ],
)
def test_values_outside_their_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Units of several rows, and stripes of several processes


def unit_loader(rows_of_unit, *, seed=0, **options):
    return LogicalBatchLoader(
        EchoDataset(),
        sampler=sampler(len(rows_of_unit), 0.5),
        generator_of=generator_of(seed),
        physical_batch_size=options.pop("size", 7),
        collate_fn=list,
        num_batches=20,
        rows_of_unit=rows_of_unit,
        **options,
    )


def patients(count=30, seed=3):
    """Rows of each unit: one to five, every row in exactly one unit."""
    sizes = np.random.default_rng(seed).integers(1, 6, size=count)
    return np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])


def test_the_rows_of_a_unit_stay_together_and_are_all_used():
    owned = patients()
    owner = {int(row): unit for unit, rows in enumerate(owned) for row in rows}
    for batch in unit_loader(owned):
        seen = set()
        for part in batch:
            rows = [row for row, _ in part.inputs]
            units = [owner[row] for row in rows]
            assert len(set(units)) == part.num_units
            assert part.unit_of_row.tolist() == [list(dict.fromkeys(units)).index(u) for u in units]
            assert not seen & set(units)
            seen |= set(units)
            for unit in set(units):
                assert set(owned[unit]) <= set(rows)
            assert len(rows) <= 7 or part.num_units == 1


def test_a_unit_is_drawn_with_probability_q_however_many_rows_it_has():
    owned = patients()
    owner = {int(row): unit for unit, rows in enumerate(owned) for row in rows}
    counts = np.zeros(len(owned))
    loader = unit_loader(owned)
    for _ in range(100):
        for batch in loader:
            for unit in {owner[row] for part in batch for row, _ in part.inputs}:
                counts[unit] += 1
    z = (counts - 1000) / math.sqrt(2000 * 0.25)
    assert np.abs(z).max() < 4.5


def test_at_most_so_many_rows_of_a_unit_are_used_and_others_each_time():
    owned = [np.arange(10)]
    used = []
    for batch in unit_loader(owned, max_rows_per_unit=3):
        for part in batch:
            rows = [row for row, _ in part.inputs]
            assert len(set(rows)) == len(rows) == 3
            used.append(tuple(rows))
    assert len(set(used)) > 1


def test_augmentations_repeat_a_row_with_other_seeds():
    owned = [np.array([0]), np.array([1, 2])]
    for batch in unit_loader(owned, augmentations=4, size=100):
        for part in batch:
            assert len({seed for _, seed in part.inputs}) == len(part.inputs)
            rows = [row for row, _ in part.inputs]
            assert {rows.count(row) for row in rows} == {4}


@pytest.mark.parametrize("owned", [None, patients()], ids=["rows", "units"])
@pytest.mark.parametrize("world_size", [2, 3, 40])
def test_stripes_of_all_processes_are_one_draw(owned, world_size):
    def loader_of(rank, world_size):
        if owned is not None:
            return unit_loader(owned, rank=rank, world_size=world_size)
        return LogicalBatchLoader(
            EchoDataset(),
            sampler=sampler(50, 0.3),
            generator_of=generator_of(),
            physical_batch_size=7,
            collate_fn=list,
            num_batches=20,
            rank=rank,
            world_size=world_size,
        )

    whole = keys_of(loader_of(0, 1))
    stripes = [loader_of(rank, world_size) for rank in range(world_size)]
    for keys, parts in zip(whole, zip(*map(keys_of, stripes), strict=True), strict=True):
        assert sorted(key for part in parts for key in part) == sorted(keys)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"augmentations": 0}, "augmentations=0"),
        ({"max_rows_per_unit": 0}, "max_rows_per_unit=0"),
        ({"rows_of_unit": [np.arange(2)]}, "rows_of_unit"),
    ],
)
def test_wrong_units_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        LogicalBatchLoader(
            EchoDataset(),
            sampler=sampler(5, 0.5),
            generator_of=generator_of(),
            physical_batch_size=2,
            collate_fn=list,
            num_batches=1,
            **changed,
        )


# Units of several rows


def rows_of(units):
    return [rows.tolist() for rows in units.rows_of_unit]


@few
@given(ids=st.lists(st.sampled_from(["ann", "bob", "7", "Z\u00fcrich 3"]), min_size=1, max_size=30))
def test_units_are_a_partition_by_id(ids):
    units = PrivacyUnits.from_ids(ids, name="patient")
    assert sorted(np.concatenate(units.rows_of_unit).tolist()) == list(range(len(ids)))
    assert len(units) == len(set(ids))
    assert all(len({ids[row] for row in rows}) == 1 for rows in units.rows_of_unit)
    assert units.num_rows == len(ids)
    assert units.largest == max(ids.count(unit) for unit in ids)


HOLDERS = {
    "tuple": tuple,
    "numpy": np.array,
    "objects": lambda ids: np.array(ids, dtype=object),
    "numpy scalars": lambda ids: list(np.array(ids)),
    "pandas": pd.Series,
    "arrow": pa.array,
}
NUMBER_HOLDERS = {
    "torch": torch.tensor,
    "torch scalars": lambda ids: list(torch.tensor(ids)),
    "numpy 0-d": lambda ids: [np.array(i) for i in ids],
    "a table with gaps": lambda ids: [float(i) for i in ids],
    "float32": lambda ids: torch.tensor(ids, dtype=torch.float32),
}


@few
@given(ids=st.lists(st.integers(-5, 5), min_size=1, max_size=20))
@pytest.mark.parametrize("holder", [*HOLDERS, *NUMBER_HOLDERS])
def test_units_do_not_depend_on_what_holds_the_ids(ids, holder):
    """A tensor's elements equal nothing but themselves, so each row would be a unit."""
    expected = rows_of(PrivacyUnits.from_ids(ids, name="patient"))
    held = {**HOLDERS, **NUMBER_HOLDERS}[holder](ids)
    assert rows_of(PrivacyUnits.from_ids(held, name="patient")) == expected
    if holder in HOLDERS:
        held = HOLDERS[holder]([f"p{i} " for i in ids])
        assert rows_of(PrivacyUnits.from_ids(held, name="patient")) == expected


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([b"p7001", b""], "ids holds values of type bytes; write all"),
        ([("p7001",)] * 2, "values of type tuple"),
        ([True, False], "values of type bool"),
        (np.array([True, False]), "values of type bool"),
        ([object(), 7001], "values of type int, object"),
        ([7001, "7001"], "values of type int, str"),
        ([7001.0, "7001"], "values of type int, str"),
        (torch.tensor([[7001], [7002]]), "values of type list"),
        (list(torch.tensor([[7001], [7002]])), "values of type Tensor"),
        (np.array(["2026-07-01", "2026-07-02"], dtype="datetime64[D]"), "values of type date"),
        ([7001.0, float("inf")], "ids holds 1 floats that are no exact whole numbers"),
        ([7001.5, 7002.5], "ids holds 2 floats"),
        ([2.0**53, 1.0], "ids holds 1 floats"),
        (torch.tensor([7001.0, 2.0**24]), "ids holds 1 floats"),
        (list(np.array([7001, 2**24], dtype=np.float32)), "ids holds 1 floats"),
        (np.array([1.0, 2048.0], dtype=np.float16), "ids holds 1 floats"),
        ("p7001", "ids is of type str; give a list, an array or a tensor"),
        ({"p7001": 1}, "ids is of type dict"),
        (torch.tensor(7001), "ids is of type Tensor"),
    ],
)
def test_what_is_no_id_is_refused_by_its_type(ids, message):
    with pytest.raises(ValueError, match=message) as refusal:
        PrivacyUnits.from_ids(ids, name="patient")
    assert "700" not in str(refusal.value)


WORDS = ["nan", "none", "null", "n/a", "na", "-", "--", "?", "unknown", "unk", "missing"]


@few
@given(
    missing=st.sampled_from([None, float("nan"), np.datetime64("NaT"), "", "\u200b", *WORDS]),
    blanks=st.sampled_from(["", " ", "\t", "\u00a0"]),
    change=st.sampled_from([str.lower, str.upper, str.title]),
)
def test_a_missing_id_is_refused_with_a_count(missing, blanks, change):
    if isinstance(missing, str):
        missing = blanks + change(missing) + blanks
    with pytest.raises(ValueError, match="2 of 4 rows have no patient id"):
        PrivacyUnits.from_ids(["a", missing, "b", missing], name="patient")


RESPELLINGS = [
    str.upper,
    str.lower,
    str.title,
    lambda i: f" {i}\u00a0",
    lambda i: " ".join(i),
    lambda i: "\u200b".join(i),
    lambda i: i + "\u2060\ufeff\u00ad\ufe0f",
    lambda i: unicodedata.normalize("NFD", i),
    lambda i: "".join(chr(ord(c) + 0xFEE0) if c.isascii() and c.isalnum() else c for c in i),
    lambda i: f"00{i}" if i.isdecimal() else i,
    lambda i: "".join(chr(0x660 + int(c)) for c in i) if i.isdecimal() else i,
]
IDS = st.one_of(
    st.text("ab\u00e9\u00df\u00f1-_0179", min_size=1).filter(lambda i: any(map(str.isalnum, i))),
    st.text("0179", min_size=1),
).filter(lambda i: canonical_id(i) != "na")


@few
@given(unit=IDS, changes=st.lists(st.sampled_from(RESPELLINGS), min_size=1, max_size=4))
def test_one_id_in_two_spellings_is_never_two_units(unit, changes):
    spelled = unit
    for change in changes:
        spelled = change(spelled)
    assert canonical_id(spelled) == canonical_id(unit)
    if spelled.strip() == unit:
        assert rows_of(PrivacyUnits.from_ids([unit, spelled, "x"], name="p")) == [[0, 1], [2]]
    else:
        with pytest.raises(
            ValueError, match=r"^1 patient ids differ from others only in case"
        ) as e:
            PrivacyUnits.from_ids([unit, spelled, "x", unit], name="patient")
        assert str(e.value).endswith("invisible characters; write each id in one way.")


@settings(few, max_examples=300)
@given(unit=st.text())
def test_a_canonical_id_is_its_own_canonical_id(unit):
    assert canonical_id(canonical_id(unit)) == canonical_id(unit)


@few
@given(unit=st.from_regex(r"[a-z1-9._/-][a-z0-9._/-]*", fullmatch=True), number=st.integers())
def test_ids_that_differ_in_more_than_spelling_stay_apart(unit, number):
    assert canonical_id(unit) == unit
    assert canonical_id(number) == str(number)


PARTITION = [[0, 3], [1], [2, 4]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "one int64 array of at least one row"),
        ([*PARTITION, []], "one int64 array of at least one row"),
        ([[0, 3], [1], [2, 3]], "has 5 rows in all, so each of 0 to 4 must be in exactly one unit"),
        ([[0, 3, 3], [1], [2, 4]], "each of 0 to 5"),
        ([[0, 3], [1], [2, 5]], "each of 0 to 4"),
        ([[0, 3], [1], [2, -1]], "each of 0 to 4"),
        ([[0]] * 4, "each of 0 to 3"),
        ([[1], [2]], "each of 0 to 1"),
    ],
)
def test_units_that_are_no_partition_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        PrivacyUnits("patient", tuple(np.array(r, dtype=np.int64) for r in rows))


@pytest.mark.parametrize(
    "of_unit", [list, np.float64, lambda r: np.array(r, dtype=np.int32), lambda r: np.array([r])]
)
def test_rows_of_units_are_arrays_of_int64(of_unit):
    assert len(PrivacyUnits("patient", tuple(np.array(r) for r in PARTITION))) == 3
    with pytest.raises(ValueError, match="one int64 array of at least one row"):
        PrivacyUnits("patient", tuple(of_unit(r) for r in PARTITION))
