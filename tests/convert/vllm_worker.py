"""Decode prompts in vLLM: run by the interpreter of an environment that has it, not by pytest.

Reads a JSON object from the first line of stdin: `model` (a folder), `speculative` (vLLM's
speculative_config, or null), `prompts` (lists of token ids), `sampling` (fields of SamplingParams)
and `batch_size`. For each further line it decodes them all and writes a line of JSON to the file
that its argument names: the seconds, the token ids and the counters of that round.
"""

import json
import sys
import time

COUNTERS = {
    "vllm:spec_decode_num_drafts": "steps",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


def counters(llm):
    """Return the sums of what was counted since the engine started."""
    return {COUNTERS[m.name]: m.value for m in llm.get_metrics() if m.name in COUNTERS}


def main():
    from vllm import LLM, SamplingParams

    asked = json.loads(sys.stdin.readline())
    llm = LLM(
        model=asked["model"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_model_len=asked.get("max_model_len", 1024),
        max_num_seqs=asked.get("batch_size", 8),
        speculative_config=asked["speculative"],
    )
    sampling = SamplingParams(**asked["sampling"])
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    for _ in sys.stdin:
        before, started = counters(llm), time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds, after = time.perf_counter() - started, counters(llm)
        ids = [[list(one.token_ids) for one in output.outputs] for output in outputs]
        counted = {name: after[name] - before.get(name, 0) for name in after}
        with open(sys.argv[1], "a", encoding="utf-8") as file:
            file.write(json.dumps({"seconds": seconds, "output_ids": ids, **counted}) + "\n")


if __name__ == "__main__":
    main()
