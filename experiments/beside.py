"""Time this project beside transformers and vLLM: the same prompts, in turns.

    python experiments/beside.py --base=DIR --transformers [--assistant=DIR]
        [--drafts=WORKDIR@chain:4] [--vllm=vllm/bin/python --exported=DIR] [--prompts=FILE]
        [--threads=1] [--batch_size=1] [--rows=8] [--max_new_tokens=64] [--rounds=3]
        [--dtype=bfloat16]

A process is started for each engine: this project without a draft and with each of `--drafts`
(DRAFT@TREE, split at ";"), transformers' `generate` (batch 1) without and with its prompt lookup
and with `--assistant`, a smaller model that has a tokenizer of its own, vLLM without a head and
with `--exported`, a head as `convert --to=eagle_vllm` wrote it. All are held to the first
`--threads` cores. A round asks each of them in turn to decode all prompts; the first round compiles
and is not counted. Prints a row for each: the median of its rounds with the least and the most, and
how many texts equal those of the first row.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
VLLM_SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


class Engine:
    """A process that decodes all prompts at each line that it is sent."""

    def __init__(self, command, asked, threads, results):
        cores = ",".join(map(str, range(threads)))
        self._results = results
        self._process = subprocess.Popen(
            ["taskset", "-c", cores, *command, str(results)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=results.with_suffix(".log").open("w"),
            env=os.environ | VLLM_SETTINGS | {"OMP_NUM_THREADS": str(threads)},
            text=True,
        )
        self._send(asked)

    def decode(self):
        """Return the seconds and the token ids of one round."""
        before = self._rounds()
        self._send("go")
        while len(rounds := self._rounds()) == len(before):
            try:
                self._process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            raise SystemExit(self._results.with_suffix(".log").read_text()[-3000:])
        return json.loads(rounds[-1])

    def _rounds(self):
        whole = self._results.read_text() if self._results.exists() else ""
        return whole.split("\n")[:-1]  # without a line that is being written

    def _send(self, value):
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def decode_here(asked):
    """Return a function that decodes the prompts with this project."""
    from clover_jax import api

    models = api.load_base(asked["model"], dtype=asked["dtype"])
    if asked["draft"]:
        models = api.load_draft(
            models, asked["draft"], tree=asked["tree"], allow_base_mismatch=True
        )
    sampling = asked["sampling"]

    def decode():
        rows = api.generate_rows(
            models,
            asked["prompts"],
            max_new_tokens=sampling["max_tokens"],
            temperature=sampling["temperature"],
            ignore_eos=sampling["ignore_eos"],
            batch_size=asked["batch_size"],
        )
        return [[row["output_ids"]] for row in sorted(rows, key=lambda row: row["index"])]

    return decode


def decode_transformers(asked):
    """Return a function that decodes the prompts with transformers, greedily, one by one."""
    import torch
    import transformers

    dtype = getattr(torch, asked["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(asked["model"], dtype=dtype)
    count, options = asked["sampling"]["max_tokens"], dict(asked["generate"])
    if "assistant_model" in options:
        path = options["assistant_model"]
        options["assistant_model"] = transformers.AutoModelForCausalLM.from_pretrained(path)
        options["assistant_tokenizer"] = transformers.AutoTokenizer.from_pretrained(path)
        options["tokenizer"] = transformers.AutoTokenizer.from_pretrained(asked["model"])

    def decode():
        outputs = []
        for ids in asked["prompts"]:
            output = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                **options,
            )
            outputs.append([output[0, len(ids) :].tolist()])
        return outputs

    return decode


def work(results):
    """Decode all prompts for each line of stdin, as the worker of vLLM does with vLLM."""
    asked = json.loads(sys.stdin.readline())
    decode = (decode_here if "draft" in asked else decode_transformers)(asked)
    for _ in sys.stdin:
        started = time.perf_counter()
        ids = decode()
        seconds = time.perf_counter() - started
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps({"seconds": seconds, "output_ids": ids}) + "\n")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--base", required=True)
    for name in ("assistant", "prompts", "vllm", "exported"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--drafts", default="lookup@copy:4", help="DRAFT@TREE;...")
    for name, default in (("threads", 1), ("batch_size", 1), ("rows", 8), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32", help="of this project's and transformers'")
    return parser.parse_args()


def start(given, folder):
    """Return the engines by name, others' first."""
    import transformers

    path = Path(given.prompts or Path(given.base) / "prompts.jsonl")
    rows = path.read_text(encoding="utf-8").splitlines()[: given.rows]
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.base)
    asked = {
        "model": given.base,
        "dtype": given.dtype,
        "prompts": [tokenizer(json.loads(row)["prompt"])["input_ids"] for row in rows],
        "batch_size": given.batch_size,
        "sampling": {"temperature": 0.0, "max_tokens": given.max_new_tokens, "ignore_eos": True},
    }
    ours = [sys.executable, __file__, "--worker"]
    commands = {}
    if given.vllm:
        theirs = [given.vllm, str(REPOSITORY / "tests/convert/vllm_worker.py")]
        commands["vLLM, plain"] = (theirs, {"speculative": None})
    if given.exported:
        head = {"method": "eagle", "model": given.exported, "num_speculative_tokens": 4}
        commands["vLLM, chain:4"] = (theirs, {"speculative": head})
    if given.transformers:
        commands["transformers, plain"] = (ours, {"generate": {}})
        lookup = {"prompt_lookup_num_tokens": 10}
        commands["transformers, prompt lookup"] = (ours, {"generate": lookup})
        if given.assistant:
            assistant = {"assistant_model": given.assistant}
            commands["transformers, assistant"] = (ours, {"generate": assistant})
    commands["here, plain"] = (ours, {"draft": None})
    for draft in given.drafts.split(";"):
        name, tree = draft.split("@")
        commands[f"here, {draft}"] = (ours, {"draft": name, "tree": tree})
    return {
        name: Engine(command, asked | more, given.threads, folder / f"{number}.jsonl")
        for number, (name, (command, more)) in enumerate(commands.items())
    }


def main():
    given = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        engines = start(given, Path(folder))
        texts = {name: engine.decode()["output_ids"] for name, engine in engines.items()}
        seconds = {name: [] for name in engines}
        for _ in range(given.rounds):
            for name, engine in engines.items():
                seconds[name].append(engine.decode()["seconds"])
        for engine in engines.values():
            engine.close()

    first, *_ = engines
    reference = texts[first]
    tokens = sum(len(ids) for (ids,) in reference)
    print(f"| engine | tokens/s | of {first} | equal texts |\n| --- | --- | --- | --- |")
    plain = statistics.median(seconds[first])
    for name, times in seconds.items():
        low, median, high = (tokens / f(times) for f in (max, statistics.median, min))
        equal = sum(a == b for a, b in zip(reference, texts[name], strict=True))
        speed = f"{median:.1f} ({low:.1f}-{high:.1f}) | {plain / statistics.median(times):.2f}"
        print(f"| {name} | {speed} | {equal} of {len(reference)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
    else:
        main()
