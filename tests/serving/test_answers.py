"""A real server answers as OpenAI's would, with the text that `generate` gives."""

import functools
import json
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.decoding.grammars import COUNTS
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.models.decoder import Decoder, causal_mask, project
from clover_jax.serving.token_texts import TokenPlaces, TokenTexts
from tests.serving.asking import GREEDY, refused, streamed, text, whole
from tests.serving.conftest import AREA, CLOSE, CONVERSATION, KINDS, MESSAGES, POINT, TOOLS, text_of
from tests.tiny_tokenizers import save_byte_fallback


def together(ask, bodies):
    """Return the answers to bodies that are asked for at once: four rows cost what one does."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, bodies))


def test_every_kind_has_the_text_of_generate(client, alone):
    answers = together(functools.partial(whole, client), KINDS)
    for answer, row in zip(answers, alone, strict=True):
        (choice,) = answer["choices"]
        usage = answer["usage"]
        assert text_of(choice) == row["text"]
        assert usage["prompt_tokens"] == len(row["prompt_ids"])
        assert usage["completion_tokens"] == len(row["output_ids"])
        reason = "length" if row["finish_reason"] == "length" else "stop"
        assert choice["finish_reason"] == reason
    assert {row["finish_reason"] for row in alone} == {"length", "stop", "eos"}
    assert len(alone[12]["output_ids"]) == 8  # EOS right after min_tokens


def test_a_text_may_have_its_stop_string_and_special_tokens(alone):
    assert alone[-2]["text"] == alone[6]["text"] + "list"
    assert alone[-1]["text"] == "<|bos|>" * 4


def test_every_kind_streams_its_whole_answer(client, alone):
    usage = {"stream_options": {"include_usage": True}}
    answers = together(functools.partial(streamed, client), [body | usage for body in KINDS])
    for (*chunks, last), row in zip(answers, alone, strict=True):
        assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == row["text"]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert not any(reasons[:-1])
        assert reasons[-1] == ("length" if row["finish_reason"] == "length" else "stop")
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == len(row["output_ids"])


def test_an_answer_matches_what_its_request_asks_for(server, client):
    chat = {"messages": MESSAGES, "max_tokens": 300, "temperature": 1, "seed": 1}
    schema = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
    bodies = [
        {**chat, "response_format": schema, "n": 2},
        {**chat, "guided_json": POINT},
        {"prompt": AREA, "max_tokens": 300, "structured_outputs": {"json": json.dumps(POINT)}},
    ]
    answers = together(functools.partial(whole, client), bodies)
    for choice in [choice for answer in answers for choice in answer["choices"]]:
        assert choice["finish_reason"] == "stop"
        point = json.loads(text_of(choice))
        assert list(point) == ["x", "kind"]
        assert isinstance(point["x"], int)
        assert point["kind"] in "ab"
    pieces = streamed(client, chat | {"response_format": schema})
    joined = "".join(text_of(piece["choices"][0]) for piece in pieces)
    assert joined == text_of(answers[0]["choices"][0])
    assert text(client, chat | {"guided_choice": ["left", "right"]}) in ("left", "right")
    assert isinstance(json.loads(text(client, chat | {"guided_regex": "[0-9]{3}"})), int)
    figures = [server.figure(f"grammar_{name}_total") for name in COUNTS]
    assert min(figures) > 0
    assert figures == list(server.service.ready().scheduler.grammar_counts.values())


def test_calls_that_must_be_are(client):
    body = {"messages": MESSAGES, "tools": TOOLS, "temperature": 1, "max_tokens": 210, "seed": 4}
    named = {"type": "function", "function": {"name": "g"}}
    bodies = [
        body | {"tool_choice": choice, "parallel_tool_calls": False}
        for choice in ("required", named)
    ]
    answers = together(functools.partial(whole, client), bodies)
    streams = together(functools.partial(streamed, client), bodies)
    for answer, stream, names in zip(answers, streams, ("fg", "g"), strict=True):
        (found,) = answer["choices"]
        assert found["finish_reason"] == "tool_calls"
        assert found["message"]["content"] is None
        (call,) = found["message"]["tool_calls"]
        assert call["function"]["name"] in names
        arguments = call["function"]["arguments"]
        assert json.loads(arguments)["kind"] in "ab"
        deltas = [piece["choices"][0]["delta"] for piece in stream]
        calls = [part for delta in deltas for part in delta.get("tool_calls", ())]
        assert "".join(part["function"]["arguments"] for part in calls) == arguments


def test_a_form_that_cannot_be_is_refused_by_its_field(client):
    def said(**form):
        response = client.post("/v1/chat/completions", json={"messages": MESSAGES, **form})
        (line,) = refused(response, 400, min(form)).splitlines()
        return line

    schema = {"not": {"type": "string"}}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert said(response_format=asked) == 'response_format: json: Unimplemented keys: ["not"]'
    assert "unclosed group" in said(guided_regex="(a")
    assert 'unknown name: "x"' in said(guided_grammar="start: x")
    hungry = said(guided_grammar='start: "a"\n' * 60_000)
    assert hungry.startswith("guided_grammar: grammar: ")
    # What is too complex only later fails by itself.
    later = client.post("/v1/completions", json=GREEDY | {"guided_regex": "(a?){2000}a{2000}"})
    assert "too many expressions" in refused(later, 400, "structured_outputs")


def test_responses_are_chats_in_other_words(client):
    """The events of a stream add up to the whole response."""
    chat = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    asked = {"input": "def area(", "instructions": "Be brief.", "temperature": 0}
    asked |= {"max_output_tokens": 24, "model": "tiny"}
    response = client.post("/v1/responses", json=asked)
    assert response.status_code == 200, response.text
    body = response.json()
    assert (body["status"], body["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    (message,) = body["output"]
    assert message["content"][0]["text"] == text(client, chat)
    assert body["usage"]["output_tokens"] == 24
    assert body["usage"]["input_tokens"] == whole(client, chat)["usage"]["prompt_tokens"]

    with client.stream("POST", "/v1/responses", json=asked | {"stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event["type"].removeprefix("response.") for event in events))
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "incomplete",
    ]
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert "".join(deltas) == message["content"][0]["text"]
    # An item of an event is that of its own time.
    (added,) = (event for event in events if event["type"].endswith("item.added"))
    assert added["item"]["content"] == []
    assert added["item"]["status"] == "in_progress"


def test_turns_of_a_conversation_are_those_of_generate(client, decoded):
    messages = []
    for question, answer in zip(CONVERSATION["turns"], decoded[-1]["text"], strict=True):
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "max_tokens": 24, "temperature": 0}
        assert text(client, body) == answer
        messages.append({"role": "assistant", "content": answer})


def test_tokens_that_a_slot_holds_are_told(client):
    # Whole chunks of 64 tokens; what is the same in both and no whole chunk is read.
    prompt = [5, 6, 7] * 60
    body = GREEDY | {"prompt": prompt, "max_tokens": 4}

    def told(body):
        return whole(client, body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert told(body) == 0
    assert told(body) == told(body | {"n": 2}) == 128
    assert told(body | {"prompt": [*prompt[:100], 9, 9]}) == 64
    # Scores of a prompt need all of it.
    assert told(body | {"echo": True, "logprobs": 1}) == 0
    *_, last = streamed(client, body | {"stream_options": {"include_usage": True}})
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 128}


def test_an_answer_of_no_given_length_has_what_the_context_leaves(client):
    endless = {"temperature": 0, "ignore_eos": True}
    usage = whole(client, endless | {"messages": [{"role": "user", "content": "Hi"}]})["usage"]
    assert usage["total_tokens"] == 512
    assert whole(client, endless | {"prompt": [5] * 505})["usage"]["completion_tokens"] == 7


def test_the_first_chunk_of_a_chat_says_who_speaks(client):
    chunks = streamed(client, {"messages": MESSAGES, "max_tokens": 4, "temperature": 0})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert all("usage" not in chunk for chunk in chunks)


def test_several_prompts_have_an_answer_each_in_their_order(client, alone):
    body = GREEDY | {"prompt": [CLOSE, AREA], "max_tokens": 24}
    texts = [text_of(choice) for choice in whole(client, body)["choices"]]
    assert texts == [text(client, body | {"prompt": prompt}) for prompt in body["prompt"]]
    ids = [alone[1]["prompt_ids"], alone[0]["prompt_ids"]]
    answer = whole(client, body | {"prompt": ids})
    assert [text_of(choice) for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_choices_are_drawn_apart_and_the_same_again(client, alone):
    body = KINDS[2] | {"n": 3}
    answer = whole(client, body)
    texts = [text_of(choice) for choice in answer["choices"]]
    assert texts[0] == alone[2]["text"]
    assert len(set(texts)) == 3
    assert [text_of(choice) for choice in whole(client, body)["choices"]] == texts
    # A prompt counts once, however many answers it has.
    assert answer["usage"]["prompt_tokens"] == len(alone[2]["prompt_ids"])

    pieces = {0: "", 1: "", 2: ""}
    for chunk in streamed(client, body):
        (choice,) = chunk["choices"]
        pieces[choice["index"]] += text_of(choice)
    assert list(pieces.values()) == texts


def test_echo_puts_the_prompt_first(client, alone):
    assert text(client, GREEDY | {"echo": True}) == AREA + alone[0]["text"]
    answer = whole(client, GREEDY | {"echo": True, "max_tokens": 0})
    assert text_of(answer["choices"][0]) == AREA
    assert answer["usage"]["completion_tokens"] == 0


def test_an_answer_and_its_echo_are_scored_alike(client, alone):
    prompt_ids, output_ids = alone[0]["prompt_ids"], alone[0]["output_ids"]
    body = {"temperature": 0, "logprobs": 3}
    (answer,) = whole(client, body | {"prompt": prompt_ids, "max_tokens": 24})["choices"]
    both = {"prompt": prompt_ids + output_ids, "max_tokens": 0, "echo": True}
    (echo,) = whole(client, body | both)["choices"]

    ours, theirs = answer["logprobs"], echo["logprobs"]
    count, before = len(output_ids), len(prompt_ids)
    assert theirs["tokens"][before:] == ours["tokens"]
    assert theirs["token_logprobs"][0] is None
    assert len(ours["token_logprobs"]) == count
    assert theirs["token_logprobs"][before:] == pytest.approx(ours["token_logprobs"], abs=1e-4)
    # A greedy token is the most probable one; the offsets say where each begins.
    columns = (ours[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
    for token, value, top, offset in zip(*columns, strict=True):
        assert value == max(top.values()) == top[token]
        assert len(top) == 3
        assert answer["text"].startswith(token, offset)


def test_offsets_count_characters_though_several_tokens_spell_one(client):
    prompt = "é = 🙂 + 日本 # an end"
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = whole(client, body)["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    for token, offset in zip(tokens, offsets, strict=True):
        # A token with a part of a character reads as a replacement character.
        assert prompt.startswith(token, offset) or not prompt[offset].isascii()
    assert len(tokens) > len(set(offsets)) > 8


def test_the_first_of_sentencepiece_s_tokens_loses_its_space(tmp_path):
    texts = TokenTexts(load_tokenizer(save_byte_fallback(tmp_path)))
    ids = texts.encode("the boat\n\nhe")
    tokens = [("\u2581the", 0), ("\u2581", 3), ("b", 4), ("o", 5), ("a", 6), ("t", 7)]
    tokens += [("<0x0A>", 8), ("<0x0A>", 9), ("he", 10)]
    places = TokenPlaces(texts, is_start=True)
    assert [(texts.written(id_), places.next(id_)) for id_ in ids] == tokens
    # As an answer it keeps the space.
    places = TokenPlaces(texts, is_start=False)
    assert [places.next(id_) for id_ in ids] == [0, *(place + 1 for _, place in tokens[1:])]


def test_places_in_a_long_run_of_byte_tokens_take_no_longer_for_each(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(save_byte_fallback(tmp_path))
    decode, sizes = tokenizer.decode, []

    def counted(ids, **how):
        sizes.append(len(ids))
        return decode(ids, **how)

    monkeypatch.setattr(tokenizer, "decode", counted)
    texts = TokenTexts(tokenizer)
    places = TokenPlaces(texts, is_start=False)
    # A space, characters of four bytes and one that is the replacement character itself.
    ids = texts.encode("\N{SLIGHTLY SMILING FACE}" * 99 + "\N{REPLACEMENT CHARACTER}")
    assert len(ids) == 1 + 99 * 4 + 3
    expected = [0, *(1 + n for n in range(99) for _ in range(4)), *[100] * 3]
    assert [places.next(id_) for id_ in ids] == expected
    # Beginnings that nothing completes are a character each.
    lost = tokenizer.convert_tokens_to_ids(["<0xF0>", "<0xF0>", "b", "b"])
    assert [places.next(id_) for id_ in lost] == [101, 102, 103, 104]
    assert sum(sizes) < 200


def test_a_stream_scores_no_token_that_a_stop_string_takes_away(client):
    body = GREEDY | {"logprobs": 0}
    tokens = whole(client, body)["choices"][0]["logprobs"]["tokens"]
    # It begins in one forward's token and ends in another's.
    body |= {"stop": [tokens[9][-1] + tokens[10] + tokens[11][:1]]}
    (choice,) = whole(client, body)["choices"]
    assert len(choice["logprobs"]["tokens"]) <= 9
    chunks = streamed(client, body | {"forwards": True})
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name, values in choice["logprobs"].items():
        assert [value for logprobs in told if logprobs for value in logprobs[name]] == values


def test_scores_of_a_prompt_are_those_of_one_forward(server, client, alone):
    ids = alone[1]["prompt_ids"] + alone[1]["output_ids"]
    body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
    (echo,) = whole(client, body)["choices"]

    base = server.service.ready().models.base
    given = np.array([ids]), np.arange(len(ids))[None], causal_mask(1, len(ids))
    output = Decoder(base.config).apply({"params": base.params}, *given)
    logits = project(frozen_from_base(base.params).lm_head, output.hidden["post_norm"])[0]
    wanted = np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(len(ids) - 1), ids[1:]]
    assert echo["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)


def test_a_chat_s_tokens_are_scored(client):
    body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    (choice,) = whole(client, body | {"logprobs": True, "top_logprobs": 2})["choices"]
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == text_of(choice)
    assert all(token["bytes"] == list(token["token"].encode()) for token in tokens)
    assert all(token["top_logprobs"][0]["logprob"] == token["logprob"] for token in tokens)

    chunks = streamed(client, body | {"logprobs": True, "top_logprobs": 2})
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [token for logprobs in told if logprobs for token in logprobs["content"]] == tokens


def test_a_prediction_changes_no_text_and_is_counted(client, alone):
    prediction = {"type": "content", "content": alone[0]["text"] + " and no more"}
    answer = whole(client, GREEDY | {"prediction": prediction})
    assert text_of(answer["choices"][0]) == alone[0]["text"]
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] > 0


def forwards_of(chunks):
    """Return what the pieces of a stream say of the forwards that gave them."""
    choices = [chunk["choices"][0] for chunk in chunks]
    return [choice["forward"] for choice in choices if "forward" in choice]


def test_tau_of_the_metrics_is_that_of_the_answers(server, client):
    names = ("spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total")
    before = [server.figure(name) for name in names]
    forwards = accepted = copied = 0
    for body in KINDS[:4]:
        told = forwards_of(streamed(client, body | {"forwards": True}))
        # Prefill, forward 0, drafts nothing. Copies are pieces of their own.
        drafted = [piece for piece in told if piece["forward"]]
        number = len({piece["forward"] for piece in drafted if piece["num_tokens"]})
        forwards += number
        accepted += sum(piece["num_tokens"] for piece in drafted) - number
        copied += sum(piece["num_copied"] for piece in drafted)
    after = [server.figure(name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [forwards, accepted]
    # All drafts of lookup are copies; a limit may cut the base's own token behind them.
    assert 0 < accepted <= copied <= accepted + 4


def test_plain_decoding_has_the_same_text_and_counts_for_no_draft(server, client, alone):
    before = server.figure("spec_decode_num_drafts_total")
    chunks = streamed(client, KINDS[1] | {"draft": "none", "forwards": True})
    assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == alone[1]["text"]
    told = forwards_of(chunks)
    assert {piece["num_tokens"] for piece in told} <= {0, 1}
    assert max(piece["forward"] for piece in told) == len(alone[1]["output_ids"]) - 1
    assert server.figure("spec_decode_num_drafts_total") == before
    assert server.figure("num_requests_running") == 0
    answer = client.post("/v1/completions", json={"prompt": "Hi", "draft": "eagle"})
    assert "offers none, not 'eagle'" in refused(answer, 400, "draft")
