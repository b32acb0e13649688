"""What users and plug-in authors write, checked by ``mypy --strict`` and never run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from quasar import Draft, GenerationResult, Pipeline, Verdict, Verification, hookimpl
from quasar.drafters.model import ModelDrafter
from quasar.drafters.nested import CascadeDrafter, NestedDrafter
from quasar.loop.sampling import Sampling
from quasar.protocols import AcceptancePolicy, Bindable, Drafter, DraftSession, Verifier, VerifySession
from quasar.registry.hookspecs import Factory


class MyDrafter:
    needs: frozenset[str] = frozenset()

    def start(self, prompt_ids: Sequence[int], sampling: Sampling, target: VerifySession) -> MySession:
        return MySession()


class MySession:
    def propose(self, max_tokens: int) -> Draft:
        return Draft([1, 2][:max_tokens])

    def commit(self, token_ids: Sequence[int], verification: Verification) -> None:
        print(verification.logits.shape)


class MyPolicy:
    lossless = False
    drafter_invariant = False
    uses_draft_probs = False

    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        return Verdict(len(draft), sampling.choose(verification.logits[-1], len(draft)))


@hookimpl
def quasar_drafters() -> Mapping[str, Factory]:
    return {"mine": MyDrafter, "lazy": "package.module:attribute"}


def guess(token_ids: list[int], k: int) -> list[int]:
    return token_ids[-k:]


def ban_zero(input_ids: Tensor, scores: Tensor) -> Tensor:
    scores[:, 0] = -float("inf")
    return scores


drafter: Drafter = MyDrafter()
session: DraftSession = MySession()
policy: AcceptancePolicy = MyPolicy()
sampled: int = Sampling(temperature=0.5, seed=3).at(7).choose(Tensor(4))


def use(verifier: Verifier) -> GenerationResult:
    verify_session: VerifySession = verifier.start([1])
    verify_session.commit([2])
    Pipeline(verifier, drafter=guess, policy=policy)
    bindable: Bindable = CascadeDrafter(drafter, quantizer="none", k=16)
    model_drafter: Drafter = ModelDrafter("smollm2", k=4)
    Pipeline.from_pretrained("smollm2", drafter=model_drafter)
    print(bindable)
    Pipeline(verifier, drafter=NestedDrafter(drafter, verifier, k=8, with_probs=True), policy="block")
    pipe = Pipeline.from_pretrained("smollm2", drafter=MyDrafter(), quantizer="w8a8", exact_to="quantized")
    for chunk in pipe.stream([{"role": "user", "content": "hello"}], stop=["\n"], max_new_tokens=3):
        print(chunk.text, chunk.token_ids)
    pipe.generate_ids([1, 2], stopping_criteria=[lambda token_ids: len(token_ids) > 2])
    result = pipe.generate("hello", temperature=0.7, top_p=0.9, min_p=0.1, logits_processors=[ban_zero], logprobs=2)
    for entry in result.logprobs or ():
        print(entry.logprob, max(entry.top.values()))
    Pipeline.from_pretrained("smollm2", exact_to="full", policy="rejection")
    return pipe.reference("hello", temperature=0.0)
