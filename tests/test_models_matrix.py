"""Every model family of docs/models.md, in every engine that takes it, against batches of one."""

from pathlib import Path

import pytest
import torch
from model_zoo import FAMILIES, Family, build, documentation, freeze_unread
from per_sample_oracle import (
    assert_matches,
    backward,
    force_form,
    logits_of,
    loop_of_one,
    random_batch,
)

from hf_dpmuon.grad_sample import (
    BookKeepingGradSampleModule,
    GhostGradSampleModule,
    HooksGradSampleModule,
    PerSampleEngine,
)

INTERCEPTING = [BookKeepingGradSampleModule, GhostGradSampleModule]
SUPPORTED = [family for family in FAMILIES if not family.refused]
REFUSED = [family for family in FAMILIES if family.refused]
# Exact arithmetic would need no more than 1e-9; some models compute softmax or norms in float32.
RTOL = 1e-5


def named(families: list[Family]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", families, ids=[family.name for family in families])


@named(SUPPORTED)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_equals_batches_of_one(
    family: Family, size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where every weight's gradient is held as a pair, and where none is.

    The batch is as large as some constants in these models are, and 3, as which few are.
    """
    model = build(family)
    images, labels = random_batch(size, image_size=family.image_size, dtype=torch.float64)
    freeze_unread(model, logits_of(model(images)))
    expected = loop_of_one(model, images, labels)

    def check(engine_class: type[PerSampleEngine]) -> None:
        engine = engine_class(model)
        backward(engine, images, labels)
        assert_matches(engine, expected, rtol=RTOL)
        engine.discard()
        engine.remove_hooks()

    for pairs in (True, False):
        force_form(monkeypatch, pairs=pairs)
        for engine_class in INTERCEPTING:
            check(engine_class)
    if family.hooks:
        check(HooksGradSampleModule)
    fallbacks = [record for record in caplog.records if record.name.startswith("hf_dpmuon")]
    assert not fallbacks, "no family needs torch.func"


@named(REFUSED)
@pytest.mark.parametrize("engine_class", INTERCEPTING)
def test_refused_by_name(family: Family, engine_class: type[PerSampleEngine]) -> None:
    with pytest.raises(NotImplementedError, match=family.refused):
        engine_class(build(family))


def test_documentation_is_current() -> None:
    path = Path(__file__).parents[1] / "docs" / "models.md"
    assert path.read_text() == documentation(), "run: python tests/model_zoo.py > docs/models.md"
