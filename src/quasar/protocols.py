"""The four strategies and their sessions, the kernel that runs what a quantizer makes, and what any of them may add.

A strategy holds what is shared (weights, options). A session holds what belongs to one sequence. Two sessions of one
strategy may be alive at once and are used in any order, so nothing of a sequence may live on the strategy.

A sequence begins with ``Verifier.start`` and ``Drafter.start``, in this order. Every step of the loop calls
``DraftSession.propose``, ``VerifySession.verify``, ``AcceptancePolicy.decide``, ``VerifySession.commit``,
``DraftSession.commit``.

The protocols at the end are optional: whoever has the members of one has its ability, and they are checked where they
are there (:func:`quasar.registry.signatures.offers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from quasar.types import Draft, Quantized, Verdict, Verification

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from quasar.loop.sampling import Sampling
    from quasar.weights.record import QuantizedWeight

Invariance = Literal["bitwise", "argmax", "none"]


class DraftSession(Protocol):
    """Proposes tokens for one sequence. It may be :class:`Restartable`."""

    def propose(self, max_tokens: int) -> Draft:
        """Propose at most ``max_tokens`` (may be 0) tokens to follow what is committed; an empty draft is always legal.

        What exceeds ``max_tokens`` or the target's vocabulary is cut off before verification.
        """
        ...

    def commit(self, token_ids: Sequence[int], verification: Verification) -> None:
        """Take in the tokens that one step added (at least one), and what the target said of the last draft."""
        ...


class Drafter(Protocol):
    """Proposes cheaply. It may be :class:`Bindable`.

    ``needs`` names the features that it wants to see of each verification, usually none: ``"hidden:-1"`` is the last
    hidden state, ``"hidden:8"`` the one after eight layers. A drafter that learns from one sequence for the next says
    so with ``remembers = True``: output is the target's all the same, but the same prompt may get other drafts.
    """

    needs: frozenset[str]

    def start(self, prompt_ids: Sequence[int], sampling: Sampling, target: VerifySession) -> DraftSession:
        """Begin a sequence with a prompt of at least one token.

        A drafter whose method takes the first two arguments only is called with those.

        Args:
            prompt_ids: Prompt.
            target: The session that will verify the drafts; it has computed the prompt. It is the loop's: look at what
                it offers, and change nothing.
            sampling: How the target will choose. Most drafters ignore it; one that draws at random uses
                ``sampling.at(position).draw(probs, row)``, which shares its noise with the policy ``coupled``, and
                gives ``probs`` with its drafts where ``sampling.wants_probs``.

        Raises:
            InvalidRequestError: It has a method ``bind``, nobody called it, and it cannot draft without.
        """
        ...


class VerifySession(Protocol):
    """Runs the target over one sequence. Between steps it has cached all committed tokens but the last.

    It may be :class:`Restartable`, :class:`Prefillable` and :class:`Closable`.
    """

    def verify(self, draft: Draft) -> Verification:
        """Score a draft of k tokens (k may be 0) in one forward: ``[k+1, V]`` logits, the caller's to keep."""
        ...

    def commit(self, token_ids: Sequence[int]) -> None:
        """Keep what one step added: n tokens, of which the first n-1 are the head of the draft; roll back the rest."""
        ...


class Verifier(Protocol):
    """The target. ``vocab_size`` is V of its logits; ``max_length`` the longest sequence, ``None`` if unbounded.

    ``invariance`` declares how a row of logits depends on the width of the forward: ``"bitwise"`` not at all,
    ``"argmax"`` only in rounding (a near-tie may fall the other way), ``"none"`` no promise.

    ``approximations`` lists, in a few words each, what it does otherwise than the model that it was given beyond
    rounding: "keys and values cached in int8", say. Usually it is empty. Each is named in the guarantee.

    It may be :class:`Strictable` and :class:`Describable`, and its factory :class:`Ranked`.
    """

    vocab_size: int
    max_length: int | None
    invariance: Invariance
    approximations: tuple[str, ...]

    def start(self, prompt_ids: Sequence[int], needs: frozenset[str] = frozenset()) -> VerifySession:
        """Begin a sequence with a prompt of at least one token.

        Raises:
            UnsupportedModelError: It cannot provide what ``needs`` names.
        """
        ...


class AcceptancePolicy(Protocol):
    """Decides how much of a draft is kept.

    ``lossless``: the output is distributed exactly as the target's own. ``drafter_invariant``: it is moreover, for a
    given seed, token by token what the target would choose alone. ``uses_draft_probs``: it judges drafted tokens by the
    probabilities with which they were drawn.
    """

    lossless: bool
    drafter_invariant: bool
    uses_draft_probs: bool

    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        """Judge a draft of k tokens (k may be 0) by its ``[k+1, V]`` logits. Mutates nothing.

        Args:
            draft: With ``probs``, or without for a deterministic drafter.
            verification: Its ``rows`` are processed one by one, when they are asked for, and an error of a row is
                raised there: ask for none behind a token that is not kept. ``logits`` holds all of them, in NaN from
                the first one on that cannot be had. A row may hold -inf.
            sampling: Makes probabilities of logits, and holds the noise; row 0 is its position.
        """
        ...


class Quantizer(Protocol):
    """Makes the quantized copy of a model, and remembers nothing of it."""

    def quantize(self, model: nn.Module, calibration: Sequence[Any] | None = None) -> Quantized:
        """Return a quantized copy that shares every tensor it does not change; ``model`` itself is left as it was.

        Args:
            model: A causal LM.
            calibration: ``[1, T]`` integer tensors of token ids, ``None`` where no calibration is wanted or possible.

        Raises:
            UnsupportedModelError: Nothing in the model can be quantized this way.
            InvalidRequestError: An option does not fit the model, or needs calibration where there is none.
            NumericalError: A weight is not finite; its name is in the message.
        """
        ...

    def describe(self) -> Mapping[str, Any]:
        """The options. JSON-serialisable."""
        ...


class CheckpointFormat(Protocol):
    """Reads the layers of models that were quantized and saved by others.

    A checkpoint names its format as ``quant_method`` in the ``quantization_config`` of its ``config.json``. The core
    reads the files, builds the model, and gives each record to a kernel; a format only says what the tensors mean. It
    may have an attribute ``kernel``, the name of the one that executes the layers.
    """

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight | None:
        """One layer of the model; ``None`` where the checkpoint stores it in full.

        Args:
            name: Name of the module, as in ``model.layers.0.mlp.up_proj``.
            tensors: What is stored under that name, by the rest of the tensors' names: ``qweight``, ``scales``, …
                A ``bias`` may be among them, which is not the format's business.

        Raises:
            InvalidRequestError: It is stored in a way that this format does not know; the message says which.
        """
        ...


class Executor(Protocol):
    """One quantized weight, laid out for one kernel."""

    weight: QuantizedWeight

    def __call__(self, inputs: Tensor) -> Tensor:
        """``[..., in]`` floating inputs to ``[..., out]`` outputs of the same dtype, without bias.

        A row of the output depends on the same row of the input alone, bit by bit.
        """
        ...


class Kernel(Protocol):
    """Executes quantized weights. ``speed`` ranks kernels: the highest that does not refuse a weight gets it."""

    speed: int

    def refuses(self, weight: QuantizedWeight) -> str | None:
        """Why this kernel cannot execute ``weight`` on its device; ``None`` if it can."""
        ...

    def prepare(self, weight: QuantizedWeight) -> Executor:
        """Lay the weight out for execution. Called only where :meth:`refuses` returned ``None``."""
        ...


class Bindable(Protocol):
    """A drafter that wants to know the target's model: to compare vocabularies, say, or to share weights."""

    def bind(self, model: PreTrainedModel, tokenizer: Any, calibration: Sequence[Tensor] | None) -> Drafter:
        """Return the drafter for this model, maybe itself. Called once for each pipeline, before any forward of it.

        A pipeline that is built on a verifier has no model and does not call it.

        Args:
            model: The model as it was given, hence in full precision. It is shared: keep it, and do not change it.
            tokenizer: The model's, or ``None``.
            calibration: ``[1, T]`` integer tensors of token ids, ``None`` without a tokenizer.

        Raises:
            InvalidRequestError: It cannot draft for this model.
        """
        ...


class EasilyCalibrated(Protocol):
    """A quantizer that learns from a few of Quasar's own calibration prompts what it would learn from all.

    ``enough_prompts`` is how many are enough, at least 1; ``None``: all of them. What a user gives is used whole.
    """

    enough_prompts: int | None


class Restartable(Protocol):
    """A session of either kind that can become another sequence's, sooner than a new one could be started."""

    def restart(self, token_ids: Sequence[int]) -> None:
        """Become what ``start`` would have returned for these tokens; much of them may be what it has seen."""
        ...


class Prefillable(Protocol):
    """A verify session whose prompt can be computed piece by piece, before anything is verified.

    ``pending`` is how many tokens are committed and not cached yet, the last one left out.
    """

    pending: int

    def prefill(self, max_rows: int) -> None:
        """Compute about ``max_rows`` (at least 1) of what is pending. Where it is cut changes no bit of any logits."""
        ...


class Closable(Protocol):
    """A verify session that holds memory which is worth giving back before the session is collected."""

    def close(self) -> None:
        """Free what the sequence has cached. May be called again; nothing else may be called afterwards."""
        ...


class Strictable(Protocol):
    """A verifier that can be made ``"bitwise"`` at a price."""

    def strict(self) -> Verifier:
        """The same target, with logits that have the same bits at any width.

        Raises:
            UnsupportedModelError: They do not; the message says where they differ.
        """
        ...


class Describable(Protocol):
    """A strategy that says how it does its work."""

    def describe(self) -> Mapping[str, Any]:
        """In a mapping for JSON."""
        ...


class Ranked(Protocol):
    """A factory of verifiers that takes part in ``verifier="auto"``, where the fastest that does not refuse is taken.

    Usually the verifier's class, with ``speed`` as a class attribute and ``refuses`` as a static method. ``causal_lm``
    has speed 0.
    """

    speed: int

    def refuses(self, model: PreTrainedModel) -> str | None:
        """Why it should not run ``model``, found out quickly and without running it; ``None`` if it should."""
        ...


class ChecksOptions(Protocol):
    """A factory of verifiers that refuses the values of its options before there is a model.

    Usually the verifier's class, with ``check_options`` as a static method that takes the same options by name.
    """

    def check_options(self, **options: Any) -> None:
        """Return if the options can be honoured on this machine.

        Raises:
            InvalidRequestError: One cannot; the message has its name, its value and what would do.
        """
        ...


class ChecksSampling(Protocol):
    """A policy that cannot honour every way of choosing tokens."""

    def check_sampling(self, sampling: Sampling) -> None:
        """Return if it can decide with these settings; asked before the target is started.

        Raises:
            InvalidRequestError: It cannot; the message has the setting, its value and what would do.
        """
        ...
