"""The command line: what is printed where, with which exit status, and what it does not wait for."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quasar
from quasar.checkpoints.context import declared_context
from quasar.checkpoints.places import context_of
from quasar.commands import cli, console
from quasar.pipeline.pipeline import Pipeline
from quasar.registry.plugins import KINDS
from quasar.testing.fakes import TableLM
from quasar.types import Verdict
from toys import CHAT_TEMPLATE, character_tokenizer, table_lm, tiny_llama, toy_pipeline, word_tokenizer

PROMPT = "the cat sat"
TEXT = toy_pipeline().generate(PROMPT, max_new_tokens=12).text


class KeepAll:
    """A lossy policy."""

    lossless = False
    drafter_invariant = False
    uses_draft_probs = False

    def decide(self, draft, verification, sampling):
        return Verdict(len(draft), int(verification.logits[-1].argmax()))


@pytest.fixture
def toy(monkeypatch):
    """``generate`` decodes with the toy pipeline; returns the arguments that the pipeline was asked for with."""
    asked = []

    def from_pretrained(name, **choices):
        asked.append((name, choices))
        return toy_pipeline(chat_template=CHAT_TEMPLATE)

    monkeypatch.setattr(Pipeline, "from_pretrained", from_pretrained)
    return asked


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model fails the test."""

    def load(*arguments, **options):
        pytest.fail("a model was loaded")

    monkeypatch.setattr("quasar.checkpoints.models.load_model", load)


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """A fresh interpreter, which sees no plug-ins unless ``QUASAR_PLUGINS`` is given."""
    path = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "QUASAR_PLUGINS": "", **environment, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], capture_output=True, env=env, timeout=120, check=False)


def imported_by(process: subprocess.CompletedProcess) -> set[str]:
    """Top-level packages in the report of ``-X importtime``."""
    lines = process.stderr.decode().splitlines()
    return {line.split("|")[-1].strip().split(".")[0] for line in lines if line.startswith("import time:")}


def install_plugin(folder: Path, source: str, name: str = "acme") -> None:
    """Put a plug-in into a folder as pip would leave it."""
    (folder / f"{name}_plugin.py").write_text(source, encoding="utf-8")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[quasar]\n{name} = {name}_plugin\n", encoding="utf-8")


# What the program does not wait for


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"], ["plugins"], []])
def test_help_and_listing_import_nothing_heavy(arguments):
    """torch alone takes seconds; nobody who asks for help waits for it."""
    process = run_python("-X", "importtime", "-m", "quasar", *arguments)
    assert process.returncode == 0
    packages = imported_by(process)
    assert {"quasar", "click"} <= packages
    assert not packages & {"torch", "transformers", "rich", "numpy", "hypothesis"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"]])
def test_help_loads_no_plugin(tmp_path, arguments):
    """A plug-in that is slow or broken at import does not touch what needs no plug-in."""
    install_plugin(tmp_path, "print('imported'); raise SystemExit(7)")
    process = run_python("-m", "quasar", *arguments, QUASAR_PLUGINS="acme", PYTHONPATH=str(tmp_path))
    assert process.returncode == 0
    assert b"imported" not in process.stdout
    assert process.stderr == b""


def test_the_version_is_that_of_the_package(quasar_command):
    """For bug reports."""
    assert quasar_command("--version") == (0, f"quasar, version {quasar.__version__}\n", "")


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_without_a_command_there_is_help(quasar_command, arguments):
    """Several lines on standard output, and no error."""
    status, out, err = quasar_command(*arguments)
    assert (status, err) == (0, "")
    assert out.startswith("Usage: quasar [OPTIONS] ")
    assert "  generate" in out
    assert "  plugins" in out


# A user's mistakes


MISTAKES = {
    "unknown command": (["gnerate"], "no command named 'gnerate'. Did you mean 'generate'? Installed: generate, insp"),
    "unknown option": (["generate", "x", "--max-token", "5"], "No such option"),
    "blank prompt": (["generate", " \n"], "the prompt is blank; write one after 'quasar generate', or pipe one in"),
    "no characters": (["generate", "", "--raw"], "the prompt is blank"),
    "system, raw": (["generate", "x", "--system", "s", "--raw"], "--system needs the model's chat template"),
    "template option": (["generate", "x", "--template-option", "a"], "--template-option 'a' is not key=value"),
    "template argument": (
        ["generate", "x", "--template-option", "tokenize=true"],
        "'tokenize' is no variable of a chat",
    ),
    "template option, raw": (["generate", "x", "--template-option", "a=1", "--raw"], "and raw=True leaves that out"),
    "quiet, verbose": (["generate", "x", "-q", "-v"], "--quiet and --verbose exclude each other"),
    "quiet comparison": (["generate", "x", "-q", "--compare"], "--quiet and --compare exclude each other"),
    "greedy, sampled": (["generate", "x", "-p", "greedy", "-t", "1"], "temperature=1.0, but the policy 'greedy' never"),
    "no number": (["generate", "x", "--max-new-tokens", "many"], "'many' is not a valid integer"),
    "negative temperature": (["generate", "x", "--temperature", "-1"], "temperature=-1.0: give a number of at least 0"),
    "no budget": (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens=0: give an integer of at least 1"),
    "empty stop": (["generate", "x", "--stop", ""], "stop=['']: each stop must be a non-empty string"),
    "top-k": (["generate", "x", "--top-k", "0"], "top_k=0: give an integer of at least 1, or None"),
    "top-p": (["generate", "x", "--top-p", "2"], "top_p=2.0: give a number above 0 and up to 1, or None"),
    "min-p": (["generate", "x", "--min-p", "1.5"], "min_p=1.5: give a number from 0 to 1, or None"),
    "logprobs": (
        ["generate", "x", "--json", "--logprobs", "-1"],
        "logprobs=-1: give an integer of at least 0, or None",
    ),
    "logprobs as text": (["generate", "x", "--logprobs", "2"], "--logprobs is reported in JSON only; add --json"),
    "schema and regex": (
        ["generate", "x", "--json-schema", "s.json", "--regex", "a"],
        "--json-schema and --regex exclude each other; give one of them",
    ),
    "schema file": (
        ["generate", "x", "--json-schema", "nowhere.json"],
        "--json-schema nowhere.json: [Errno 2] No such",
    ),
    "schema, no JSON": (
        ["generate", "x", "--json-schema", __file__],
        "py: the JSON schema is not JSON: Extra data",
    ),
    "exact to whom": (["generate", "x", "--exact-to", "me"], "'me' is not one of 'quantized', 'full'"),
    "drafter": (
        ["generate", "x", "--drafter", "ngrm"],
        "no drafter named 'ngrm'. Did you mean 'ngram'? Installed: ",
    ),
    "quantizer": (
        ["generate", "x", "--quantizer", "w8a"],
        "no quantizer named 'w8a'. Did you mean 'w8a8'? Installed: ",
    ),
    "policy": (
        ["generate", "x", "--policy", "greed"],
        "no policy named 'greed'. Did you mean 'greedy'? Installed: ",
    ),
    "policy option": (["generate", "x", "--policy", "margin:k=1"], "has no option 'k'; its options: margin"),
    "verifier": (
        ["generate", "x", "--verifier", "causal"],
        "no verifier named 'causal'. Did you mean 'causal_lm'?",
    ),
    "option": (["generate", "x", "--drafter", "ngram:kk=5"], "has no option 'kk'; its options: k, max_n, min_n"),
    "option value": (["generate", "x", "--drafter", "ngram:k=0"], "ngram: k=0, expected an integer of at least 1"),
    "verifier option": (["generate", "x", "--verifier", "causal_lm:k=1"], "has no option 'k'; its options: strict"),
    "verifier value": (
        ["generate", "x", "--verifier", "causal_lm:strict=5"],
        "causal_lm: strict=5, expected true or false",
    ),
    "spec": (["generate", "x", "--drafter", "ngram:k"], "'k' in 'ngram:k' is not option=value"),
    "calibration": (["generate", "x", "--calibration", "nowhere.txt"], "cannot be read from nowhere.txt"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_status_2_before_any_model_is_loaded(quasar_command, no_model, arguments, message):
    """Nothing on standard output, no traceback, and no waiting for a model that cannot be used so."""
    status, out, err = quasar_command(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("quasar: ")
    assert err.count("\n") == 1
    assert message in err


def gguf_header(**values: int) -> bytes:
    """The beginning of a GGUF file: an array of strings and some numbers, then the values."""
    strings = b"".join(struct.pack("<Q", len(text)) + text for text in (b"one", b"", b"three"))
    parts = [(b"general.tags", 9, struct.pack("<IQ", 8, 3) + strings)]
    parts += [(b"general.sizes", 9, struct.pack("<IQ3H", 2, 3, 1, 2, 3)), (b"general.ok", 7, b"\x01")]
    parts += [(b"general.name", 8, struct.pack("<Q", 2) + b"it")]
    parts += [(name.replace("_", ".", 1).encode(), 4, struct.pack("<I", value)) for name, value in values.items()]
    written = b"".join(
        struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value for key, kind, value in parts
    )
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(parts)) + written


@pytest.mark.parametrize(
    ("files", "model", "limit"),
    [
        ({"config.json": b'{"max_position_embeddings": 512}'}, ".", 512),
        ({"config.json": b'{"text_config": {"max_position_embeddings": 256}}'}, ".", 256),
        ({"config.json": b'{"max_position_embeddings": 64, "rope_scaling": {"factor": 4.0}}'}, ".", 256),
        ({"it.gguf": gguf_header(llama_block_count=2, llama_context_length=1024)}, "it.gguf", 1024),
    ],
)
def test_a_budget_beyond_the_context_is_refused_before_the_model_is_loaded(
    quasar_command, no_model, tmp_path, files, model, limit
):
    """The model's files say how long a sequence it takes; the weights are not needed for that."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    arguments = ["generate", "x", "-m", str(tmp_path / model)]
    status, out, err = quasar_command(*arguments, "-n", str(limit))
    assert (status, out) == (2, "")
    assert err == f"quasar: max_new_tokens={limit}, but the model's context is {limit}, prompt included\n"
    with pytest.raises(pytest.fail.Exception, match="a model was loaded"):
        quasar_command(*arguments, "-n", str(limit - 1))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b"{}"),
        ("it.gguf", b""),
        ("it.gguf", b"PK"),
        ("it.gguf", gguf_header()[:-3]),
        ("it.gguf", gguf_header(llama_block_count=2)),
    ],
)
def test_a_file_that_says_nothing_of_the_context_is_left_to_whoever_loads_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert declared_context(str(tmp_path), name if name == "it.gguf" else None) is None


@pytest.mark.real_model
def test_the_demo_model_says_how_long_its_context_is():
    assert context_of("smollm2") == 8192


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "there is no folder nowhere; give a folder, a .gguf file, a Hub id or 'smollm2'"),
        ("nowhere.gguf", "there is no file nowhere.gguf; give a .gguf file, a folder, a Hub id or 'smollm2'"),
    ],
)
def test_a_model_that_is_not_there_is_a_mistake(quasar_command, model, message):
    """One line that says what was looked for."""
    status, out, err = quasar_command("generate", "x", "--model", model)
    assert (status, out, err) == (2, "", f"quasar: {message}\n")


def test_a_fault_of_ours_is_a_traceback_and_status_1(quasar_command, monkeypatch):
    """So that it can be reported."""

    def fail(*arguments, **options):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(Pipeline, "from_pretrained", fail)
    status, out, err = quasar_command("generate", "x")
    assert (status, out) == (1, "")
    assert "Traceback" in err
    assert "ZeroDivisionError: ours" in err


def test_an_interrupt_is_quiet(quasar_command, monkeypatch):
    """Ctrl-C while a model loads ends with the status of an interrupt and prints no traceback."""

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Pipeline, "from_pretrained", interrupt)
    assert quasar_command("generate", "x") == (130, "", "")


# generate


def test_the_text_goes_to_standard_output_and_everything_else_to_standard_error(quasar_command, toy):
    """The text can be piped on; the table and the guarantee are for the person."""
    status, out, err = quasar_command("generate", PROMPT, "--raw", "--max-new-tokens", "12", "--verbose")
    assert (status, out) == (0, TEXT + "\n")
    assert "this run" in err
    assert "guarantee: target: the tokens equal those of the" in err
    assert "target alone" not in err


def is_terminal(monkeypatch, *names):
    """Let standard streams say that a person sits before them."""
    for name in names:
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True, raising=False)


def test_a_redirected_standard_error_stays_empty_unless_more_is_asked_for(quasar_command, toy):
    """A log file of a thousand answers is no place for a thousand tables."""
    arguments = ["generate", PROMPT, "--raw", "--max-new-tokens", "12"]
    assert quasar_command(*arguments) == (0, TEXT + "\n", "")
    assert "guarantee: target" in quasar_command(*arguments, "-v")[2]
    assert "identical: all 12" in quasar_command(*arguments, "--compare")[2]


@pytest.mark.parametrize(("options", "lines"), [([], 1), (["-q"], 0), (["-v"], 8), (["--compare"], 9)])
def test_a_person_gets_one_line_after_the_answer(quasar_command, toy, monkeypatch, capsys, options, lines):
    """Tokens, tokens a step and a second; more with --verbose or --compare, nothing with --quiet."""
    is_terminal(monkeypatch, "stderr")
    status, out, err = quasar_command("generate", PROMPT, "--raw", "--max-new-tokens", "12", *options)
    assert (status, out) == (0, TEXT + "\n")
    err = err.rpartition("\x1b[K")[2]  # what a terminal still shows
    assert len(err.strip().splitlines()) == lines
    if lines == 1:
        assert re.fullmatch(r"\n12 tokens, \d\.\d\d a step, [\d.]+ a second\n", err)


@pytest.mark.parametrize("options", [["-v"], ["--compare"]])
def test_the_numbers_of_the_table_are_whole_in_a_terminal_of_44_columns(quasar_command, toy, monkeypatch, options):
    """Whatever the terminal says of itself: the table is as wide as it needs, and that is little."""
    monkeypatch.setenv("COLUMNS", "44")
    _, _, err = quasar_command("generate", PROMPT, "--raw", "--max-new-tokens", "12", *options)
    stats = toy_pipeline().generate(PROMPT, max_new_tokens=12).stats
    rows = {line[:15].strip(): line[15:].split() for line in err.splitlines() if len(line) <= 44}
    expected = [f"{stats['mean_acceptance_length']:.2f}", *(["1.00"] if "--compare" in options else [])]
    assert rows["tokens a step"] == expected
    assert rows["tokens"] == ["12"] * len(expected)
    assert rows["steps"] == [str(stats["steps"]), "12"][: len(expected)]


def test_a_line_ends_after_an_interrupt(quasar_command, toy, monkeypatch):
    """The text that is there stays, and the shell begins a line of its own."""

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("quasar.pipeline.generation.Generation.__next__", interrupted)
    assert quasar_command("generate", PROMPT) == (130, "\n", "")
    is_terminal(monkeypatch, "stderr")
    status, out, err = quasar_command("generate", PROMPT)
    assert (status, out, err.rpartition("\x1b[K")[2]) == (130, "\n", "\n")


def test_a_pipe_is_read_without_a_dash(quasar_command, toy, monkeypatch):
    """Also one that begins with the byte order mark of Windows' editors."""
    for piped in (PROMPT, "\ufeff" + PROMPT):
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
        assert quasar_command("generate", "--raw", "-n", "12")[:2] == (0, TEXT + "\n")


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "-"], ["generate", "--raw"]])
def test_an_empty_pipe_is_refused(quasar_command, no_model, monkeypatch, arguments):
    """There is nothing to answer."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    status, out, err = quasar_command(*arguments)
    assert (status, out) == (2, "")
    assert err == "quasar: the prompt is blank; write one after 'quasar generate', or pipe one in\n"


def test_without_a_prompt_a_person_is_not_waited_for(quasar_command, no_model, monkeypatch):
    """A program that waits for a keyboard without a word looks broken."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("typed"))
    is_terminal(monkeypatch, "stdin")
    status, out, err = quasar_command("generate")
    assert (status, out) == (2, "")
    assert err == "quasar: there is no prompt; write one after 'quasar generate', or pipe one in\n"


def test_system_message_and_template_options_reach_the_template(quasar_command, monkeypatch):
    """As messages and ``template_options`` do in Python; values that read as JSON are that."""
    template = "{{ mode }} {% for m in messages %}{{ m['role'] }} says {{ m['content'] }} {% endfor %}answer"
    pipe = toy_pipeline(chat_template=template)
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda name, **_: pipe)
    arguments = ["generate", PROMPT, "--json", "-n", "5", "--system", "the moon", "--template-option", "mode=true"]
    found = json.loads(quasar_command(*arguments, "--template-option", "other=a b")[1])
    messages = [{"role": "system", "content": "the moon"}, {"role": "user", "content": PROMPT}]
    options = {"mode": True, "other": "a b"}
    expected = pipe.generate(messages, max_new_tokens=5, template_options=options)
    assert found["token_ids"] == list(expected.token_ids)
    assert found["config"]["template_options"] == options


def test_special_tokens_are_shown_where_they_are_asked_for(quasar_command, monkeypatch):
    """The end of the answer, for instance."""
    lm = table_lm()
    lm.row = lambda context: torch.eye(lm.vocab_size, dtype=torch.float64)[0 if len(context) > 4 else 6]
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda name, **_: Pipeline(lm, word_tokenizer(), eos_token_ids=0))
    assert quasar_command("generate", PROMPT)[1] == "cat cat\n"
    assert quasar_command("generate", PROMPT, "--show-special-tokens")[1] == "cat cat <eos>\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--drafter", "ngrm"],
        ["--policy", "coupling:x=1"],
        ["--verifier", "natve"],
        ["--quantizer", "w8"],
        ["--temperature", "-1"],
        ["-n", "0"],
        ["--top-p", "2"],
        ["--stop", ""],
        ["--template-option", "x"],
    ],
)
def test_what_needs_no_model_is_refused_before_torch_is_imported(arguments):
    """Nobody waits for seconds to hear of a slip of the finger."""
    process = run_python("-X", "importtime", "-m", "quasar", "generate", "x", *arguments)
    assert process.returncode == 2
    assert not imported_by(process) & {"torch", "transformers", "rich", "numpy"}
    last = process.stderr.decode().strip().splitlines()[-1]
    assert last.startswith("quasar: ")


def test_the_options_reach_the_pipeline(quasar_command, toy):
    """Model and strategies as they were written; what was not, by its default."""
    quasar_command(
        "generate", "x", "--model", "m", "--drafter", "ngram:k=2", "--policy", "greedy", "--dtype", "float32"
    )
    quasar_command("generate", "x")
    defaults = {
        "drafter": "ngram",
        "quantizer": "auto",
        "policy": "auto",
        "verifier": "auto",
        "exact_to": "quantized",
        "dtype": None,
        "device": None,
        "calibration": None,
        "strict": False,
    }
    assert toy == [
        ("m", {**defaults, "drafter": "ngram:k=2", "policy": "greedy", "dtype": "float32"}),
        ("smollm2", defaults),
    ]


def test_exact_to_full_is_exact_to_the_full_model(quasar_command, monkeypatch):
    """The quantized copy drafts for it, and the guarantee is the full model's."""
    tokenizer = word_tokenizer()
    build = Pipeline.from_model
    loaded = {"drafter", "quantizer", "policy", "verifier", "exact_to", "calibration"}

    def from_pretrained(name, **choices):
        return build(tiny_llama(), tokenizer, **{key: choices[key] for key in loaded})

    monkeypatch.setattr(Pipeline, "from_pretrained", from_pretrained)
    arguments = ["generate", PROMPT, "--max-new-tokens", "20", "--exact-to", "full", "--compare", "--json"]
    found = json.loads(quasar_command(*arguments)[1])
    assert found["guarantee"].startswith("full: the tokens equal those of the model as it was given")
    assert found["reference"]["identical"] is True
    assert (found["config"]["exact_to"], found["config"]["quantizer"]) == ("full", "w8a8")


def test_a_prompt_gets_the_chat_template_unless_it_is_raw(quasar_command, toy):
    """As by Pipeline.generate."""
    _, templated, _ = quasar_command("generate", PROMPT, "--max-new-tokens", "12")
    _, raw, _ = quasar_command("generate", PROMPT, "--max-new-tokens", "12", "--raw")
    expected = toy_pipeline(chat_template=CHAT_TEMPLATE).generate(PROMPT, max_new_tokens=12).text
    assert (templated, raw) == (f"{expected}\n", f"{TEXT}\n")
    assert templated != raw


def test_compare_decodes_once_more_and_says_whether_the_tokens_are_identical(quasar_command, toy):
    """Two rows and a verdict, on standard error."""
    status, out, err = quasar_command("generate", PROMPT, "--raw", "--compare", "--max-new-tokens", "12")
    assert (status, out) == (0, TEXT + "\n")
    assert "speculative" in err
    assert "target alone" in err
    assert "identical: all 12 tokens equal those of the target decoded one token a step" in err
    assert "NOT" not in err


def test_a_difference_is_said_with_its_position(quasar_command, monkeypatch):
    """A lossy policy keeps a draft that the target would not have said."""
    lossy = toy_pipeline(policy=KeepAll(), drafter=lambda token_ids, k: [5] * min(k, 3))
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda name, **_: lossy)
    arguments = ["generate", PROMPT, "--max-new-tokens", "12", "--compare"]
    status, _, err = quasar_command(*arguments)
    assert status == 0
    assert "NOT identical: the tokens differ from position 0 on" in err
    assert "guarantee: none: KeepAll is lossy" in err
    found = json.loads(quasar_command(*arguments, "--json")[1])
    assert found["reference"]["identical"] is False
    assert found["reference"]["token_ids"] != found["token_ids"]


@pytest.mark.parametrize(
    ("tokens", "reference", "verdict"),
    [
        ((1, 2, 3), (1, 2, 3), "identical: all 3 tokens"),
        ((1, 2, 3), (1, 5, 3), "NOT identical: the tokens differ from position 1 on"),
        ((1, 2, 3), (1, 2), "NOT identical: the tokens differ from position 2 on"),
        ((1,), (1, 2), "NOT identical: the tokens differ from position 1 on"),
    ],
)
def test_the_comparison_is_made_not_assumed(tokens, reference, verdict):
    """It names the first position at which the two part."""
    assert console.comparison(tokens, reference).startswith(verdict)


KEYS = ["text", "token_ids", "finish_reason", "guarantee", "stats", "config"]


@pytest.mark.parametrize(
    ("options", "keys"), [([], KEYS), (["--compare"], [*KEYS, "reference"]), (["--no-speculation"], KEYS)]
)
def test_json_is_one_object_of_ascii(quasar_command, toy, options, keys):
    """Fixed keys, one line, nothing else on either stream; it survives any console encoding."""
    arguments = ["generate", PROMPT, "--raw", "--json", "--max-new-tokens", "12", "--stop", "★ 👍", "--seed", "3"]
    status, out, err = quasar_command(*arguments, *options)
    assert (status, err) == (0, "")
    assert out.isascii()
    assert out.count("\n") == 1
    found = json.loads(out)
    assert list(found) == keys
    result = toy_pipeline().generate(PROMPT, max_new_tokens=12)
    assert (found["text"], found["token_ids"]) == (result.text, list(result.token_ids))
    assert found["finish_reason"] == "length"
    assert list(found["stats"]) == list(result.stats)
    settings = {"max_new_tokens": 12, "temperature": 0.0, "top_k": None, "top_p": None, "min_p": None, "seed": 3}
    described = {"exact_to": "target", "invariance": "bitwise", "approximations": [], **settings, "logprobs": None}
    text = {"skip_special_tokens": True, "template_options": {}}
    unset = ("json_schema", "regex", "repetition_penalty", "no_repeat_ngram_size", "min_new_tokens")
    assert found["config"] == {**described, "stop": ["★ 👍"], "raw": True, **text, **dict.fromkeys(unset)}
    if "reference" in keys:
        assert list(found["reference"]) == ["identical", "token_ids", "stats"]
        assert found["reference"]["identical"] is True
        assert found["reference"]["token_ids"] == found["token_ids"]


def test_the_settings_of_sampling_reach_the_pipeline(quasar_command, toy):
    """One by one: each option has its part in the tokens, and the JSON says what was asked for."""
    arguments = ["generate", PROMPT, "--raw", "--json", "--max-new-tokens", "25"]
    settings = {"temperature": 40.0, "seed": 5}
    outputs = []
    shorthands = [("repetition_penalty", 1.5), ("no_repeat_ngram_size", 2), ("min_new_tokens", 4)]
    for name, value in [("top_k", 3), ("top_p", 0.7), ("min_p", 0.4), ("seed", 6), *shorthands]:
        asked = {**settings, name: value}
        options = [part for key, x in asked.items() for part in (f"--{key.replace('_', '-')}", str(x))]
        found = json.loads(quasar_command(*arguments, *options)[1])
        assert found["token_ids"] == list(toy_pipeline().generate(PROMPT, max_new_tokens=25, **asked).token_ids)
        assert found["config"].items() >= asked.items()
        outputs.append(tuple(found["token_ids"]))
    assert (
        len({*outputs, toy_pipeline().generate(PROMPT, max_new_tokens=25, **settings).token_ids}) >= 6
    )  # no EOS here for min_new_tokens


def test_sampled_output_is_compared_with_the_same_seed(quasar_command, toy):
    """It is identical too, and the guarantee names the seed."""
    arguments = ["generate", PROMPT, "--raw", "--compare", "--max-new-tokens", "12"]
    status, out, err = quasar_command(*arguments, "--temperature", "40", "--seed", "8")
    text = toy_pipeline().reference(PROMPT, max_new_tokens=12, temperature=40, seed=8).text
    assert (status, out) == (0, text + "\n")
    assert "identical: all 12 tokens" in err
    assert "with the same seed (8)" in err


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("options", [[], ["--no-speculation"], ["--compare"]])
def test_log_probabilities_are_in_the_json_where_they_are_asked_for(quasar_command, toy, n, options):
    """One object a token: its own logarithm, and the n best tokens with theirs, best first."""
    arguments = ["generate", PROMPT, "--raw", "--json", "--max-new-tokens", "12", "--temperature", "40", *options]
    found = json.loads(quasar_command(*arguments, "--logprobs", str(n))[1])
    expected = toy_pipeline().reference(PROMPT, max_new_tokens=12, temperature=40, logprobs=n)
    assert list(found)[: len(KEYS) + 1] == [*KEYS, "logprobs"]
    assert found["logprobs"] == [
        {"logprob": entry.logprob, "top": {str(token_id): value for token_id, value in entry.top.items()}}
        for entry in expected.logprobs
    ]
    assert [list(entry["top"]) for entry in found["logprobs"]] == [
        [str(token_id) for token_id in entry.top] for entry in expected.logprobs
    ]
    assert all(len(entry["top"]) == n for entry in found["logprobs"])
    assert found["config"]["logprobs"] == n
    assert "logprobs" not in json.loads(quasar_command(*arguments)[1])


def test_tokens_of_no_probability_are_left_out_of_the_json(quasar_command, monkeypatch):
    """JSON has no minus infinity."""
    lm = table_lm()
    lm.row = lambda context: torch.tensor([float("-inf")] * 5 + [1.0] * (lm.vocab_size - 5), dtype=torch.float64)
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda name, **_: Pipeline(lm, word_tokenizer()))
    _, out, _ = quasar_command("generate", PROMPT, "--json", "--max-new-tokens", "3", "--logprobs", "1000")
    assert "Infinity" not in out
    assert [len(entry["top"]) for entry in json.loads(out)["logprobs"]] == [lm.vocab_size - 5] * 3


def test_the_output_of_generate_can_be_constrained(quasar_command, monkeypatch, tmp_path):
    """By a schema from a file or by a regular expression, with drafts and without; the JSON says by what."""
    pytest.importorskip("llguidance")
    tokenizer = character_tokenizer()
    pipe = Pipeline(TableLM(len(tokenizer), seed=1), tokenizer, eos_token_ids=tokenizer.eos_token_id)
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda name, **_: pipe)
    file = tmp_path / "schema.json"
    file.write_text('{"type": "boolean"}', encoding="utf-8-sig")  # as editors on Windows write it
    for options in (["--compare"], ["--no-speculation"]):
        found = json.loads(quasar_command("generate", "abc", "--json", *options, "--regex", "[x-z]{9}")[1])
        assert re.fullmatch("[x-z]{9}", found["text"])
        assert found["config"].items() >= {"regex": "[x-z]{9}", "json_schema": None}.items()
        assert found.get("reference", {"identical": True})["identical"] is True
        found = json.loads(quasar_command("generate", "abc", "--json", *options, "--json-schema", str(file))[1])
        assert found["text"] in ("true", "false")
        assert found["config"].items() >= {"regex": None, "json_schema": str(file)}.items()


@pytest.mark.parametrize(
    ("option", "written", "message"),
    [
        ("--json-schema", '{"type": "text"}', "schema.json: the JSON schema cannot be used: Invalid type: text"),
        ("--json-schema", "\xff", "schema.json: 'utf-8' codec can't decode byte 0xff"),
        ("--regex", "(a", "the regular expression cannot be used: at 1(8): invalid regex"),
    ],
)
def test_a_constraint_of_generate_is_refused_before_a_model_is_loaded(
    quasar_command, no_model, tmp_path, option, written, message
):
    """One line, with the reason."""
    pytest.importorskip("llguidance")
    file = tmp_path / "schema.json"
    file.write_bytes(written.encode("latin-1"))
    status, out, err = quasar_command("generate", "x", option, str(file) if option == "--json-schema" else written)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_without_speculation_the_target_decodes_alone(quasar_command, toy):
    """One token a step, no drafts, and a guarantee that says so."""
    arguments = ["generate", PROMPT, "--raw", "--max-new-tokens", "12", "--no-speculation"]
    assert quasar_command(*arguments)[1] == TEXT + "\n"
    found = json.loads(quasar_command(*arguments, "--json")[1])
    assert (found["stats"]["steps"], found["stats"]["drafted_tokens"]) == (12, 0)
    assert found["guarantee"].endswith("itself, one token a step")


def test_stop_may_be_given_twice(quasar_command, toy):
    """The earlier of the two ends the text."""
    first, second = TEXT.split()[3], TEXT.split()[6]
    for stops in ((first, second), (second, first)):
        arguments = [part for stop in stops for part in ("--stop", stop)]
        status, out, _ = quasar_command("generate", PROMPT, "--raw", "--max-new-tokens", "12", *arguments)
        assert (status, out) == (0, TEXT.partition(first)[0] + "\n")


def test_a_dash_reads_the_prompt_from_standard_input(quasar_command, toy, monkeypatch):
    """So that a prompt may be long."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    status, out, _ = quasar_command("generate", "-", "--raw", "--max-new-tokens", "12")
    assert (status, out) == (0, TEXT + "\n")


def test_standard_input_that_is_no_text_is_a_mistake(quasar_command, toy, monkeypatch):
    """A file in another encoding: one line, no traceback."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 "), encoding="utf-8"))
    status, out, err = quasar_command("generate", "-")
    assert (status, out) == (2, "")
    assert err == "quasar: standard input is not utf-8 text: invalid continuation byte at byte 3\n"


def test_an_argument_that_is_no_text_is_a_mistake(quasar_command, toy):
    """Bytes that the locale cannot decode arrive as surrogates."""
    status, out, err = quasar_command("generate", "caf\udce9")
    assert (status, out) == (2, "")
    assert "half a character: it was read with a wrong encoding; give UTF-8" in err


def test_brackets_in_a_spec_are_printed_as_they_are(quasar_command, monkeypatch):
    """The guarantee quotes the quantizer's spec, and that is no markup."""
    target = "the model quantized by w8a8:exclude=[/b] :smile:"
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda name, **_: toy_pipeline(target_name=target))
    status, _, err = quasar_command("generate", PROMPT, "--max-new-tokens", "3", "--verbose")
    assert status == 0
    assert target in err


# Consoles and pipes


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_console_that_cannot_show_a_character_gets_a_question_mark(toy, monkeypatch, encoding):
    """The text goes on, the status is 0, and there is no traceback."""
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding=encoding) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(sys, "argv", ["quasar", "generate", PROMPT, "--raw", "-n", "40", "-v"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, err = (stream.buffer.getvalue().decode(encoding) for stream in streams.values())
    text = toy_pipeline().generate(PROMPT, max_new_tokens=40).text
    assert exit_.value.code == 0
    assert out.strip() == text.encode(encoding, errors="replace").decode(encoding)
    assert "?" in out
    assert not text.isascii()
    assert "guarantee: target" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_the_console_s_encoding_is_that_of_the_environment(tmp_path, encoding):
    """The same in a process of its own: a cause that the console cannot show."""
    install_plugin(tmp_path, "raise ImportError('no ★ today')")
    environment = {"QUASAR_PLUGINS": "acme", "PYTHONPATH": str(tmp_path), "PYTHONIOENCODING": encoding}
    listing = run_python("-m", "quasar", "plugins", **environment)
    assert (listing.returncode, listing.stderr) == (0, b"")
    assert b"ImportError: no ? today" in listing.stdout
    strict = run_python("-m", "quasar", "plugins", "--strict", **environment)
    assert strict.returncode == 2
    assert b"ImportError: no ? today" in strict.stderr
    assert b"Traceback" not in strict.stderr
    as_json = run_python("-m", "quasar", "plugins", "--json", **environment)
    assert json.loads(as_json.stdout)[-1]["cause"].endswith("no ★ today")


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_pipe_ends_quietly(toy, monkeypatch, closed):
    """Whoever reads the text, or the table, may go: status 0, and nothing is left to fail at exit."""
    reading, writing = os.pipe()
    os.close(reading)
    other = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with open(writing, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe if closed == "stdout" else other)
        monkeypatch.setattr(sys, "stderr", pipe if closed == "stderr" else other)
        monkeypatch.setattr(sys, "argv", ["quasar", "generate", PROMPT, "--raw", "-n", "12", "-v"])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        pipe.flush()
    assert exit_.value.code == 0
    assert other.buffer.getvalue().decode() == ("" if closed == "stdout" else TEXT + "\n")


def test_a_reader_that_leaves_ends_the_process_quietly():
    """As ``quasar plugins | head -c0``: status 0, and Python does not complain at exit."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe:
        process = subprocess.run(
            [sys.executable, "-m", "quasar", "plugins"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            env={**os.environ, "QUASAR_PLUGINS": ""},
            timeout=120,
            check=False,
        )
    assert (process.returncode, process.stderr) == (0, b"")


# plugins


def test_the_listing_names_kind_name_origin_version_and_status(quasar_command):
    """One line each under a head, in columns."""
    status, out, err = quasar_command("plugins")
    table, missing = out.strip().rsplit("\n\n", 1)
    head, *rows = [line.split() for line in table.splitlines()]
    assert (status, err) == (0, "")
    assert head == ["KIND", "NAME", "ORIGIN", "VERSION", "STATUS"]
    assert ["drafter", "ngram", "quasar-decode", quasar.__version__, "ok"] in rows
    assert {row[0] for row in rows} == {*KINDS, "command"}
    assert missing.startswith("not installed: quasar-native (compiled kernels")


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """A broken plug-in and one that wants a built-in's name."""
    install_plugin(tmp_path, "raise ImportError('libacme.so is\\nmissing')", "acmebroken")
    source = (
        "import quasar\n@quasar.hookimpl\ndef quasar_drafters():\n    return {'ngram': 'acme:It', 'other': 'acme:It'}\n"
    )
    install_plugin(tmp_path, source, "acmetwin")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("QUASAR_PLUGINS", "acmebroken,acmetwin")
    yield
    for name in ("acmebroken_plugin", "acmetwin_plugin"):
        sys.modules.pop(name, None)


def test_plugins_json_has_a_fixed_schema(quasar_command, acme):
    """Every row has the same keys; a broken plug-in is a row with its cause, and so is a name that is taken."""
    status, out, err = quasar_command("plugins", "--json")
    rows = json.loads(out)
    assert (status, err) == (0, "")
    assert all(list(row) == ["kind", "name", "origin", "version", "entry_point", "status", "cause"] for row in rows)
    assert {row["status"] for row in rows} == {"ok", "shadowed", "broken"}
    assert all((row["cause"] is None) == (row["status"] == "ok") for row in rows)
    *_, shadowed, broken = rows
    assert [shadowed[key] for key in ("kind", "name", "origin")] == ["drafter", "ngram", "acmetwin"]
    assert "provides that name already" in shadowed["cause"]
    assert [broken[key] for key in ("kind", "name", "origin", "version", "entry_point")] == [
        *("plug-in", "acmebroken", "acmebroken", "1.0", "acmebroken"),
    ]
    assert broken["cause"] == (
        "plug-in acmebroken 1.0 [acmebroken] cannot be loaded: ImportError: libacme.so is missing"
    )


def test_the_listing_goes_on_after_a_broken_plugin_and_says_why(quasar_command, acme):
    """It is listed, not dropped; others are there as well."""
    status, out, _ = quasar_command("plugins")
    assert status == 0
    assert "broken: plug-in acmebroken 1.0 [acmebroken] cannot be loaded: ImportError: libacme.so is missing" in out
    assert "shadowed: drafter 'ngram' of acmetwin 1.0 [acmetwin] is ignored" in out
    assert any(line.split()[:3] == ["drafter", "other", "acmetwin"] for line in out.splitlines())


def test_strict_makes_problems_a_status(quasar_command, acme, monkeypatch):
    """For CI: 2 and one line with all of them, after the whole listing; 0 where there are none."""
    status, out, err = quasar_command("plugins", "--strict")
    assert status == 2
    assert "acmetwin" in out
    assert err.startswith("quasar: 2 problems: plug-in acmebroken 1.0 [acmebroken] cannot be loaded: ")
    assert err.count("\n") == 1
    monkeypatch.setenv("QUASAR_PLUGINS", "")
    assert quasar_command("plugins", "--strict")[0] == 0


def test_a_comparison_without_speculation_is_refused(quasar_command):
    """There would be nothing to compare."""
    status, out, err = quasar_command("generate", PROMPT, "--compare", "--no-speculation")
    assert (status, out) == (2, "")
    assert "--compare" in err
    assert "--no-speculation" in err
