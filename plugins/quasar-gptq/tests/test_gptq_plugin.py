"""The plug-in is found by its entry point, and chosen by a spec string."""

from __future__ import annotations

import pytest

from quasar.errors import InvalidRequestError
from quasar.registry.plugins import load_plugins
from quasar.registry.registry import Registry, default_registry
from quasar_gptq.checkpoint import GptqFormat
from quasar_gptq.quantizer import GptqQuantizer


@pytest.fixture
def only_gptq(monkeypatch):
    """Of all installed plug-ins this one loads."""
    monkeypatch.setenv("QUASAR_PLUGINS", "quasar-gptq")
    default_registry.cache_clear()
    yield
    default_registry.cache_clear()


def test_it_provides_a_quantizer_and_a_checkpoint_format(only_gptq):
    """Listed with where they come from, and nothing is wrong with them."""
    registry = Registry(load_plugins())
    assert registry.problems() == []
    for kind in ("quantizer", "checkpoint"):
        (entry,) = (entry for entry in registry.entries(kind) if entry.origin.distribution == "quasar-gptq")
        assert entry.name == "gptq"


def test_spec_strings_choose_its_options(only_gptq):
    """And an option that it does not have is refused with those that it has."""
    quantizer = default_registry().build("quantizer", "gptq:bits=3,group=-1,act_order=true,damp=0.05")
    assert isinstance(quantizer, GptqQuantizer)
    description = quantizer.describe()
    assert [description[key] for key in ("bits", "group", "act_order", "damp")] == [3, -1, True, 0.05]
    with pytest.raises(InvalidRequestError, match=r"no option 'group_size'.*group"):
        default_registry().build("quantizer", "gptq:group_size=32")


def test_the_format_is_built_from_a_checkpoint_s_configuration(only_gptq):
    """As the core does it."""
    form = default_registry().build("checkpoint", "gptq", {"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert isinstance(form, GptqFormat)
