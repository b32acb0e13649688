"""What top-k, top-p and min-p leave is what transformers' warpers leave, ties and order of the cuts included."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import quasar.loop.cuts as cuts_module
from quasar.loop.cuts import Cuts
from quasar.loop.sampling import Sampling
from quasar.testing.running import examples

INF = float("inf")


def warped(row: np.ndarray, cuts: Cuts) -> torch.Tensor:
    """The oracle: transformers' own warpers in their own order, ``[V]`` float64 scores."""
    warpers = [TemperatureLogitsWarper(cuts.temperature)]
    if cuts.top_k is not None:
        warpers.append(TopKLogitsWarper(cuts.top_k))
    if cuts.top_p is not None and cuts.top_p < 1:
        warpers.append(TopPLogitsWarper(cuts.top_p))
    if cuts.min_p is not None:
        warpers.append(MinPLogitsWarper(cuts.min_p))
    return LogitsProcessorList(warpers)(None, torch.from_numpy(row.astype(np.float64)).unsqueeze(0))[0]


def finite(ids: np.ndarray | None, row: np.ndarray) -> list[int]:
    ids = np.arange(len(row)) if ids is None else ids
    return [int(i) for i in ids if row[i] > -INF]


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """Rows with ties and ``-inf``, short ones of a few levels and long ones of any values, in both dtypes."""
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    generator = np.random.default_rng(draw(st.integers(0, 10**6)))
    size = draw(st.one_of(st.integers(1, 12), st.integers(13, 6000)))
    spread = draw(st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0]))
    row = generator.standard_normal(size) * spread
    if draw(st.booleans()):
        row = np.round(row)
    row[generator.random(size) < draw(st.sampled_from([0.0, 0.3]))] = -INF
    row[generator.integers(size)] = abs(row[np.isfinite(row)]).max(initial=1.0)
    return row.astype(dtype)


def some_cuts() -> st.SearchStrategy[Cuts]:
    share = st.one_of(st.sampled_from([0.25, 0.5, 0.75, 0.9, 0.95, 1.0]), st.floats(1e-9, 1.0))
    return st.builds(
        Cuts,
        temperature=st.sampled_from([0.01, 0.3, 0.7, 1.0, 2.5, 1e3]),
        top_k=st.none() | st.integers(1, 60),
        top_p=st.none() | share,
        min_p=st.none() | share | st.just(0.0),
    )


def test_what_is_kept_is_what_the_warpers_keep():
    """The same tokens; and both ways are taken, the fast one mostly."""
    seen: Counter[str] = Counter()
    by_warpers = Cuts.by_warpers

    def counted(self, row):
        seen["by warpers"] += 1
        return by_warpers(self, row)

    @examples(400)
    @given(rows(), some_cuts())
    def check(row: np.ndarray, cuts: Cuts) -> None:
        seen["all"] += 1
        seen["cut"] += cuts.kept(row) is not None
        expected = np.flatnonzero(np.isfinite(warped(row, cuts).numpy())).tolist()
        assert finite(cuts.kept(row), row) == expected

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts_module.Cuts, "by_warpers", counted)
        check()
    assert 0 < seen["by warpers"] < seen["all"] / 2, seen
    assert seen["cut"] > seen["all"] / 2, seen


@given(rows(), some_cuts())
def test_probabilities_are_the_softmax_of_what_the_warpers_leave(row, cuts):
    """To rounding, which grows with the scores."""
    sampling = Sampling(temperature=cuts.temperature, top_k=cuts.top_k, top_p=cuts.top_p, min_p=cuts.min_p)
    expected = warped(row, cuts).softmax(dim=0)
    torch.testing.assert_close(sampling.probabilities(torch.from_numpy(row)), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("p", [0.5, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_rows_of_a_real_vocabulary_are_cut_without_sorting_it(p, spread, monkeypatch):
    """Right, and hardly ever with the warpers' help."""
    helped = []
    by_warpers = Cuts.by_warpers
    monkeypatch.setattr(Cuts, "by_warpers", lambda self, row: helped.append(row) or by_warpers(self, row))
    for seed in range(4):
        row = (np.random.default_rng(seed).standard_normal(49152) * spread).astype(np.float32)
        cuts = Cuts(0.7, top_p=p, min_p=1e-6)
        assert cuts.kept(row).tolist() == np.flatnonzero(np.isfinite(warped(row, cuts).numpy())).tolist()
    assert len(helped) <= 1
