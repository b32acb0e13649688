"""For authors of plug-ins: checks that a strategy keeps its protocol, fakes to test it with, and strategies for
hypothesis. Needs the extra ``testing``.

A conformance test of a package is one line a strategy, as in ``check_drafter("echo:k=3")``; or no line at all:
``pytest --quasar-check my-distribution`` checks everything that the distribution registers.
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError as _error:  # pragma: no cover
    raise ImportError("quasar.testing needs hypothesis: pip install 'quasar-decode[testing]'") from _error

from quasar.testing.drafters import check_drafter
from quasar.testing.fakes import ByteTokenizer, TableLM, scripted
from quasar.testing.models import tiny
from quasar.testing.policies import check_policy
from quasar.testing.quantizers import check_quantizer
from quasar.testing.running import ConformanceError
from quasar.testing.sessions import session_machine
from quasar.testing.verifiers import check_verifier

__all__ = [
    "ByteTokenizer",
    "ConformanceError",
    "TableLM",
    "check_drafter",
    "check_policy",
    "check_quantizer",
    "check_verifier",
    "scripted",
    "session_machine",
    "tiny",
]
