"""Opacus' own tests, run against our engines.

Its tests of single layers draw shapes and options with hypothesis and compare with batches of one.
They read ``p.grad_sample``, which our engines do not have; here they get each sample's gradient as
the weighted sum under a weight that singles it out. Left out are

- examples with a batch of size 0 or a batch that is not the first dimension, which our engines
  never see; with them all of ``dp_multihead_attention_test``, whose every example has the batch
  second (the layer itself is tested here, with the batch first);
- ``embedding_bag_test``, whose bags are offsets into one row of tokens: refused by name;
- ``dp_rnn_test``: recurrent layers, which are refused;
- ``embedding_norm_sample_test``: a function of Opacus' own ghost clipping, no layer;
- ``gradient_accumulation_test``, which reads ``p.grad_sample`` through ``PrivacyEngine``: the sum
  over physical batches is compared with ``DPOptimizer`` below.
"""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from opacus.grad_sample import GradSampleModule
from opacus.layers import DPMultiheadAttention
from opacus.optimizers import DPOptimizer
from opacus.utils.per_sample_gradients_utils import compute_microbatch_grad_sample
from per_sample_oracle import force_form, weighted_sum
from torch import Tensor, nn

from hf_dpmuon.grad_sample import (
    BookKeepingGradSampleModule,
    GhostGradSampleModule,
    PerSampleEngine,
)

settings.register_profile("opacus", max_examples=100, deadline=None)
settings.load_profile("opacus")  # read when the decorators of the following modules run
from opacus.tests.grad_sample_module_test import GradSampleModuleTest, SampleConvNet  # noqa: E402
from opacus.tests.grad_samples.common import GradSampleHooks_test  # noqa: E402
from opacus.tests.grad_samples.conv1d_test import Conv1d_test  # noqa: E402
from opacus.tests.grad_samples.conv2d_test import Conv2d_test  # noqa: E402
from opacus.tests.grad_samples.conv3d_test import Conv3d_test  # noqa: E402
from opacus.tests.grad_samples.embedding_test import Embedding_test  # noqa: E402
from opacus.tests.grad_samples.group_norm_test import GroupNorm_test  # noqa: E402
from opacus.tests.grad_samples.instance_norm1d_test import InstanceNorm1d_test  # noqa: E402
from opacus.tests.grad_samples.instance_norm2d_test import InstanceNorm2d_test  # noqa: E402
from opacus.tests.grad_samples.instance_norm3d_test import InstanceNorm3d_test  # noqa: E402
from opacus.tests.grad_samples.layer_norm_test import LayerNorm_test  # noqa: E402
from opacus.tests.grad_samples.linear_test import Linear_test  # noqa: E402
from opacus.tests.grad_samples.rms_norm_test import RMSNorm_test  # noqa: E402
from opacus.tests.grad_samples.sequence_bias_test import SequenceBias_test  # noqa: E402

settings.load_profile("default")

ENGINES = [BookKeepingGradSampleModule, GhostGradSampleModule]


class Adapter:
    """Runs one of Opacus' layer tests against both engines, in both forms of a gradient."""

    def run_test(
        self,
        x: Tensor,
        module: nn.Module,
        batch_first: bool = True,
        atol: float = 1e-5,
        rtol: float = 1e-4,
        **_: Any,
    ) -> None:
        if len(x) == 0 or not batch_first:
            return
        expected = compute_microbatch_grad_sample(x, module, loss_reduction="sum")
        for engine_class in ENGINES:
            for pairs in (True, False):
                with pytest.MonkeyPatch.context() as patch:
                    force_form(patch, pairs=pairs)
                    actual = self.per_sample_gradients(engine_class(module), x)
                self.check_shapes(expected, actual, "sum")
                self.check_values(expected, actual, "sum", atol, rtol)

    def per_sample_gradients(self, engine: PerSampleEngine, x: Tensor) -> dict[str, Tensor]:
        output = engine(x)
        F.l1_loss(output, torch.zeros_like(output), reduction="sum").backward()
        norms = engine.per_unit_norms()
        sums = [weighted_sum(engine, one) for one in torch.eye(len(x))]
        gradients = {name: torch.stack([row[name] for row in sums]) for name in sums[0]}
        for name, norm in norms.items():
            wanted = gradients[name].flatten(1).norm(dim=1)
            torch.testing.assert_close(norm, wanted, rtol=1e-3, atol=1e-3 * float(1 + wanted.max()))
        engine.discard()
        engine.remove_hooks()
        return gradients


class TestConv1d(Adapter, Conv1d_test):
    pass


class TestConv2d(Adapter, Conv2d_test):
    pass


class TestConv3d(Adapter, Conv3d_test):
    pass


class TestEmbedding(Adapter, Embedding_test):
    pass


class TestGroupNorm(Adapter, GroupNorm_test):
    pass


class TestInstanceNorm1d(Adapter, InstanceNorm1d_test):
    pass


class TestInstanceNorm2d(Adapter, InstanceNorm2d_test):
    pass


class TestInstanceNorm3d(Adapter, InstanceNorm3d_test):
    pass


class TestLayerNorm(Adapter, LayerNorm_test):
    pass


class TestLinear(Adapter, Linear_test):
    pass


class TestRMSNorm(Adapter, RMSNorm_test):
    pass


class TestSequenceBias(Adapter, SequenceBias_test):
    pass


class BatchFirstAttention(nn.Module):
    """Opacus' attention with the batch first."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = DPMultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x.sin(), x.cos())[0]
        return output


class TestMultiheadAttention(Adapter, GradSampleHooks_test):
    def test_batch_first(self) -> None:
        for size, bias, zero in product([1, 3, 4], [False, True], [False, True]):
            with self.subTest(size=size, bias=bias, add_zero_attn=zero):
                module = BatchFirstAttention(bias=bias, add_zero_attn=zero)
                self.run_test(torch.randn(size, 16, 4), module)


class TestBookKeepingModule(GradSampleModuleTest):
    CLS = staticmethod(lambda model, **_: BookKeepingGradSampleModule(model))


class TestGhostModule(GradSampleModuleTest):
    CLS = staticmethod(lambda model, **_: GhostGradSampleModule(model))


# Imported for their subclasses above; pytest would collect them here, too.
del Conv1d_test, Conv2d_test, Conv3d_test, Embedding_test, GroupNorm_test, LayerNorm_test
del InstanceNorm1d_test, InstanceNorm2d_test, InstanceNorm3d_test, Linear_test, RMSNorm_test
del SequenceBias_test, GradSampleHooks_test
del GradSampleModuleTest


@pytest.mark.parametrize("engine_class", ENGINES)
def test_accumulated_clipped_sum_is_that_of_dpoptimizer(
    engine_class: type[PerSampleEngine],
) -> None:
    """Over physical batches of unequal size, against Opacus' optimizer on its own module."""
    torch.manual_seed(0)
    model = SampleConvNet()
    images, labels = torch.randn(11, 3, 28, 28), torch.randint(0, 10, (11,))
    bound = 5.0  # clips some samples

    theirs = GradSampleModule(model, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        expected_batch_size=1,
    )
    for rows in torch.arange(11).split(4):
        F.cross_entropy(theirs(images[rows]), labels[rows], reduction="sum").backward()
        optimizer.clip_and_accumulate()
        for p in model.parameters():
            p.grad_sample = None
    expected = {name: p.summed_grad.clone() for name, p in model.named_parameters()}
    model = theirs.to_standard_module()
    model.zero_grad()

    ours = engine_class(model)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    clipped = []
    for rows in torch.arange(11).split(3):
        F.cross_entropy(ours(images[rows]), labels[rows], reduction="sum").backward()
        norms = ours.per_unit_norms()
        factor = bound / (torch.stack(list(norms.values())).norm(dim=0) + 1e-6)
        clipped += (factor < 1).tolist()
        ours.add_weighted_sum(dict.fromkeys(norms, factor.clamp(max=1.0)), into=total)
        ours.discard()
    assert any(clipped)
    assert not all(clipped)
    for name, sum_ in expected.items():
        torch.testing.assert_close(total[name], sum_, rtol=1e-4, atol=1e-5, msg=name)
