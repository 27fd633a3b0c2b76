"""Claims of the pages about their Python blocks, asserted after a block has run."""

from __future__ import annotations

CLAIMS = {
    "README.md": {
        "The capital of Egypt": """
            assert "Cairo" in output.texts[0] and "5, 6, 7, 8" in output.texts[1]
            assert all(len(row) <= 8 for row in output.generated_token_ids)
            assert len(vectors) == 2 and not (vectors[0] == vectors[1]).all()""",
    },
    "docs/embeddings.md": {
        "model.embed(": """
            assert vectors.shape == (2, model.dimensions)""",
    },
    "docs/guide.md": {
        "The capital of Egypt": """
            assert "Cairo" in output.texts[0] and output.metrics.num_generated_tokens <= 4""",
        "model.stream(": """
            drawn = SamplingConfig(do_sample=True, temperature=0.7, seed=1, max_new_tokens=60)
            pieces = list(model.stream(prompt, drawn))
            assert len(pieces) > 10
            assert "".join(pieces) == model.generate(prompt, SamplingConfig(
                do_sample=True, temperature=0.7, seed=1, max_new_tokens=60)).texts[0]""",
        "model.astream(": """
            prompts = ["The capital of Japan is", "1, 2, 3, 4,"]
            assert asyncio.run(both()) == model.generate(prompts, SamplingConfig(max_new_tokens=8)).texts""",
        '["1, 2, 3, 4,"': """
            assert "5, 6, 7, 8" in output.texts[0] and "Tokyo" in output.texts[1]
            assert all(len(row) <= 8 for row in output.generated_token_ids)""",
        "model.session()": """
            assert logits.shape == (1, model.config.vocab_size)
            assert token == model.generate(ids, SamplingConfig(max_new_tokens=1)).generated_token_ids[0][0]
            assert logprobs[0].max() < 1e-5
            assert len(logprobs[0]) == len(model.tokenizer("The capital of Japan is Tokyo.")["input_ids"]) - 1""",
        'quantization="int4"': """
            assert small.memory_report().compression() > 3
            assert small.memory_report().total < model.memory_report().total / 2""",
    },
    "docs/structured.md": {
        "import json": """
            assert set(json.loads(out.texts[0])) == {"city", "people"} and out.finish_reasons == ["stop"]""",
        "tools=tools": """
            assert answer.finish_reason == "tool_calls" and call.name == "get_weather" and "Rome" in call.arguments
            assert "25" in model.chat(messages, tools=tools).text""",
        "except ValueError": """
            assert "#/properties/a/not: not supported" in str(caught)""",
        "Grammar.lark": r"""
            import re
            assert re.match(r"[0-9]{1,3}(,|$)", model.generate("1, 2, 3: ", SamplingConfig(
                grammar=numbers, max_new_tokens=20)).texts[0])""",
        "person = ": """
            assert out.texts[0].startswith(f"Name: {name.text}, age ") and name.logprob < 0""",
        "structural_tag": """
            assert out.texts[0]""",
    },
    "docs/integrations.md": {
        "langchain_openai": """
            assert "Paris" in answer.content and answer.usage_metadata["output_tokens"] > 3 and len(story) > 5""",
        "litellm": """
            assert "Madrid" in answer.choices[0].message.content and answer.usage.completion_tokens > 3""",
        "kani": """
            assert "Rome" in said""",
    },
    "docs/guidance.md": {
        "gen, regex": """
            assert "Tokyo" in answer["city"] and out["next"] == "5" and out["pet"] in ("dogs", "cats")""",
        "lm.batch": """
            assert texts == [str(lm + question + gen(max_tokens=8)) for question in questions]
            assert "Cairo" in texts[0]""",
        "get_weather": """
            assert "sunny, 24 degrees" in str(chat) and "24" in chat["answer"]""",
    },
    "docs/kani.md": {
        "full_round(question)": """
            assert answer.text == "It is 24 degrees." and answer.extra["pace"]["cached_prompt_tokens"] > 0""",
        "choices=": """
            story, choice = asyncio.run(choose())
            assert choice in ("a cat", "a dog") and [story, choice] == asyncio.run(choose())""",
    },
    "docs/decoding.md": {
        "add_request": """
            assert "Cairo" in urgent.text and urgent.done and all(request.done for request in requests)
            alone = [model.generate(prompt, config).texts[0] for prompt in (
                "1, 2, 3, 4,", "The capital of Japan is", "Once upon a time")]
            assert [request.result().texts[0] for request in requests] == alone""",
        "AllowedTokens(": """
            assert len(out.generated_token_ids[0]) == 4 and set(out.generated_token_ids[0]) <= set(digits)""",
        "StepFeedback": """
            assert "bear" in story.texts[0] and "fox" not in story.texts[0].split("bear")[0]""",
        "token_healing": """
            assert healed.texts[0].startswith("nce") and not plain.texts[0].startswith("nce")""",
        "def watch": r"""
            assert out.finish_reasons[0] == "cancelled" and out.texts[0].count("\n") <= 1
            assert len(out.generated_token_ids[1]) < 200""",
        "class Budget": """
            said = [*model.tokenizer("1, 2, 3, 4,")["input_ids"], *out.generated_token_ids[0]]
            last = said[-len(out.generated_token_ids[0]) - 1:]
            assert all(a != b for a, b in zip(last, last[1:]))
            assert out.texts[0].count(",") == 2 == out.generated_token_ids[0].count(comma)
            unlimited = model.generate("1, 2, 3, 4,", SamplingConfig(max_new_tokens=16))
            assert unlimited.texts[0].count(",") > 2""",
        "prompt_logprobs": """
            assert out.prompt_logprobs[0][0] is None
            scored = model.score("The capital of Japan is")[0].tolist()
            assert [entry.logprob for entry in out.prompt_logprobs[0][1:]] == scored
            assert all(len(entry.top) == 2 for entry in out.logprobs[0])""",
        "num_beams=4": """
            assert len(output.texts) == 3 and output.sequence_scores == sorted(output.sequence_scores, reverse=True)
            likely = model.generate("Once upon a time", SamplingConfig(max_new_tokens=20))
            greedy = model.score(likely.output_token_ids)[0][-20:]
            assert output.sequence_scores[0] >= float(greedy.mean()) - 1e-5""",
        "PromptLookupConfig())": """
            plain = LLMModel(TINY).generate("1, 2, 3, 4, 5, 6, 7, 8, 9,", SamplingConfig(max_new_tokens=40))
            assert output.generated_token_ids == plain.generated_token_ids""",
    },
    "docs/tools.md": {
        "read_tools": """
            from pace.llm.chat import ArgumentsPiece, CallBegins, CallEnds
            assert isinstance(events[0], CallBegins) and events[0].name == "get_weather"
            assert "".join(e.text for e in events if isinstance(e, ArgumentsPiece)) == '{"city": "Rome"}'
            assert events[-1] == CallEnds(0)""",
    },
    "docs/adapters.md": {
        "load_adapter": """
            assert poetic.texts != plain.texts and model.adapters == []
            assert plain.texts == model.generate("Once upon a time", max_new_tokens=8).texts""",
    },
    "docs/decisions.md": {
        "model.decide": """
            assert abs(sum(answers["topic"]["probabilities"].values()) - 1) < 1e-6
            assert answers["topic"]["choice"] in ("money", "delivery", "praise")
            assert 0 <= answers["urgency"]["score"] <= 2 and len(answers["urgency"]["legend"]) == 3""",
    },
    "docs/cache.md": {
        "load_session": """
            with model.session() as session:
                session.append(document)
                assert (session.append(model.tokenizer.encode(" One day")) == logits).all()""",
        "prefix_cache_bytes": """
            assert output.metrics.num_reused_tokens >= 16 and output.metrics.num_reused_tokens % 16 == 0""",
    },
    "docs/serving.md": {
        "Count from one to ten": """
            assert chunk.choices[0].finish_reason in ("stop", "length")""",
        "get_weather": """
            function = answer.choices[0].message.tool_calls[0].function
            assert (function.name, function.arguments) == ("get_weather", '{"city": "Rome"}')""",
    },
    "docs/embedding-server.md": {
        "client.embeddings": """
            assert len(answer.data) == 2 and answer.usage.prompt_tokens > 8""",
    },
    "docs/scaling.md": {
        "map_batches(": """
            from pace.llm import LLMModel, SamplingConfig
            prompts, config = [row["question"] for row in rows], SamplingConfig(max_new_tokens=16)
            assert [row["answer"] for row in rows] == LLMModel(TINY).generate(prompts, config).texts
            assert len(rows) == 3 and not any(row["error"] for row in rows)""",
    },
    "docs/quantization.md": {
        "careful": """
            matrices = model._model.matrices()
            layouts = {part: matrix.plan.layouts.get(part) for matrix in matrices for part in matrix.parts}
            assert all(layout is None for part, layout in layouts.items() if ".layers.0." in part)
            down, gate = layouts["model.layers.1.mlp.down_proj"], layouts["model.layers.1.mlp.gate_proj"]
            assert (down.code, gate.code, gate.group, gate.has_mins) == ("int8", "int4", 32, True)""",
    },
}
"""Page -> a phrase of one block -> Python code that fails if the text around the block is wrong."""
