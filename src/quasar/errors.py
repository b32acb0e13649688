"""Every error that Quasar raises on purpose. A message says what was asked, what was got and what would do."""


class QuasarError(Exception):
    """Root of all errors raised on purpose; the command line prints them as one line and exits with 2."""


class InvalidRequestError(QuasarError, ValueError):
    """An argument, option or spec string that cannot be honoured."""


class UnknownStrategyError(InvalidRequestError):
    """A strategy was asked for by a name that nothing installed provides."""


class ModelNotFoundError(QuasarError):
    """The model that was asked for is neither on this machine nor reachable."""


class CheckpointError(QuasarError):
    """A file of a model that is damaged, incomplete, or not what its description says."""


class UnsupportedModelError(QuasarError):
    """The model was found, but what was asked cannot be done with it (its cache cannot roll back, say)."""


class PluginError(QuasarError):
    """A plug-in failed to load, or its strategy broke the protocol it claims to implement."""


class NumericalError(QuasarError):
    """Weights or logits that are not finite where a number is needed."""
