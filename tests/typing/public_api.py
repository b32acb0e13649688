"""What users and plug-in authors write, checked by ``mypy --strict`` and never run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quasar import Draft, GenerationResult, Pipeline, Verdict, Verification, hookimpl
from quasar.hookspecs import Factory
from quasar.protocols import AcceptancePolicy, Drafter, DraftSession, Need, Verifier, VerifySession


class MyDrafter:
    needs: frozenset[Need] = frozenset()

    def start(self, prompt_ids: Sequence[int]) -> MySession:
        return MySession()


class MySession:
    def propose(self, max_tokens: int) -> Draft:
        return Draft([1, 2][:max_tokens])

    def commit(self, token_ids: Sequence[int], verification: Verification) -> None:
        print(verification.logits.shape)


class MyPolicy:
    lossless = False

    def decide(self, draft: Draft, verification: Verification) -> Verdict:
        return Verdict(len(draft), int(verification.logits[-1].argmax()))


@hookimpl
def quasar_drafters() -> Mapping[str, Factory]:
    return {"mine": MyDrafter, "lazy": "package.module:attribute"}


def guess(token_ids: list[int], k: int) -> list[int]:
    return token_ids[-k:]


drafter: Drafter = MyDrafter()
session: DraftSession = MySession()
policy: AcceptancePolicy = MyPolicy()


def use(verifier: Verifier) -> GenerationResult:
    verify_session: VerifySession = verifier.start([1])
    verify_session.commit([2])
    Pipeline(verifier, drafter=guess, policy=policy)
    pipe = Pipeline.from_pretrained("smollm2", drafter=MyDrafter(), quantizer="w8a8", exact_to="quantized")
    for chunk in pipe.stream([{"role": "user", "content": "hello"}], stop=["\n"], max_new_tokens=3):
        print(chunk.text, chunk.token_ids)
    pipe.generate_ids([1, 2], stopping_criteria=[lambda token_ids: len(token_ids) > 2])
    return pipe.reference("hello", temperature=0.0)
