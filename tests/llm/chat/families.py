"""Chat templates with the forms of published ones, in a few lines each: how they write thoughts, calls and results."""

from __future__ import annotations

SYSTEM = (
    "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
)
LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in rest %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
TAGGED = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ '\n' }}<function={{ c.function.name }}>{{ '\n' }}"
    "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>{{ '\n' }}"
    "{{ value | tojson if value is mapping or value is sequence and value is not string else value | string }}"
    "{{ '\n' }}</parameter>{{ '\n' }}{% endfor %}</function>{{ '\n' }}</tool_call>{{ AFTER }}{% endfor %}"
)
"""Calls in Qwen3-Coder's form: a string as it is, a list or dict as JSON, and any other value as Python shows it."""
RESULTS = (
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{{ '\n' }}{% endif %}<tool_response>{{ '\n' }}{{ m.content }}"
    "{{ '\n' }}</tool_response>{{ '\n' if not loop.last and loop.nextitem.role == 'tool' else '<|im_end|>\n' }}"
)
TAGGED_TOOLS = (
    "{% if tools %}{% for t in tools %}<function>{{ t.function.name }}</function>{% for key, p in "
    "t.function.parameters.properties | items %}<parameter>{{ key }}: {{ p.type }}</parameter>{% endfor %}"
    "{% endfor %}<tool_call>{{ '\n' }}<function=f>{{ '\n' }}<parameter=p>...{% endif %}"
)

QWEN35 = (
    "{{ raise_exception('No user query') if 'user' not in messages | map(attribute='role') }}"
    + SYSTEM
    + LAST_QUESTION
    + "{% if tools or first %}<|im_start|>system{{ '\n' }}"
    + TAGGED_TOOLS
    + "{{ first }}<|im_end|>{{ '\n' }}{% endif %}{% for m in rest %}"
    "{% if m.role == 'system' %}{{ raise_exception('System message must be first') }}"
    "{% elif m.role == 'user' %}<|im_start|>user{{ '\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant{{ '\n' }}"
    "{% if loop.index0 > ns.last or preserve_thinking %}<think>{{ '\n' + (m.reasoning_content or '') | trim + '\n' }}"
    "</think>{{ '\n\n' }}{% endif %}{{ m.content or '' }}"
    + TAGGED.replace("AFTER", "'' if loop.last else '\n'")
    + "<|im_end|>{{ '\n' }}{% elif m.role == 'tool' %}"
    + RESULTS
    + "{% else %}{{ raise_exception('Unexpected role') }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant{{ '\n' }}{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}"
    "{% endif %}"
)
"""Qwen 3.5 and later: the prompt begins the thought, and thoughts before the last question are dropped."""

QWEN_CODER = (
    SYSTEM + "<|im_start|>system{{ '\n' + first }}" + TAGGED_TOOLS + "<|im_end|>{{ '\n' }}"
    "{% for m in rest %}{% if m.role == 'assistant' and m.tool_calls %}"
    "<|im_start|>assistant{{ '\n' }}{% if m.content is string and m.content %}{{ m.content + '\n' }}{% endif %}"
    + TAGGED.replace("AFTER", "'' if loop.last else '\n'")
    + "<|im_end|>{{ '\n' }}{% elif m.role == 'tool' %}"
    + RESULTS
    + "{% else %}<|im_start|>{{ m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
"""Qwen3-Coder, without thoughts. Messages other than calls must have text as their content."""

NEMOTRON3 = (
    SYSTEM
    + LAST_QUESTION
    + "<|im_start|>system{{ '\n' + first }}"
    + TAGGED_TOOLS
    + "<|im_end|>{{ '\n' }}{% set truncates = truncate_history_thinking | default(true) %}{% for m in rest %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant{{ '\n' }}"
    "{% if m.reasoning_content and not (truncates and loop.index0 < ns.last) %}"
    "<think>{{ '\n' + m.reasoning_content + '\n' }}</think>{{ '\n' }}{% else %}<think></think>{% endif %}"
    "{{ m.content or '' }}"
    + TAGGED.replace("AFTER", "'\n'")
    + "<|im_end|>{{ '\n' }}{% elif m.role == 'tool' %}"
    + RESULTS
    + "{% else %}<|im_start|>{{ m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}"
    "{{ '<think></think>' if enable_thinking is false else '<think>\n' }}{% endif %}"
)
"""Nemotron 3: as Qwen 3.5, with an empty thought in place of each one that is dropped."""

LISTED = "{% if tools %}List of tools: MARKS[{{ tools | map('tojson') | join(', ') }}]MARKE{% endif %}"
"""A list of tools as in LFM2, in the system turn."""
LFM2 = (
    SYSTEM
    + "<|startoftext|>{% if tools or first %}<|im_start|>system{{ '\n' + first }}"
    + LISTED.replace("MARKS", "<|tool_list_start|>").replace("MARKE", "<|tool_list_end|>")
    + "<|im_end|>{{ '\n' }}{% endif %}{% for m in rest %}"
    "<|im_start|>{{ m.role + '\n' }}{% set content = m.content if m.content is string else m.content | tojson %}"
    "{{ '<|tool_response_start|>' + content + '<|tool_response_end|>' if m.role == 'tool' else content }}"
    "<|im_end|>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
"""LFM2, whose template knows no calls: they are part of the content."""

LFM25 = (
    SYSTEM
    + LAST_QUESTION
    + "<|startoftext|>{% if tools or first %}<|im_start|>system{{ '\n' + first }}"
    + LISTED.replace("MARKS", "").replace("MARKE", "")
    + "<|im_end|>{{ '\n' }}{% endif %}{% for m in rest %}"
    "<|im_start|>{{ m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% if m.thinking and (loop.index0 > ns.last or preserve_thinking) %}<think>{{ m.thinking }}</think>{% endif %}"
    "{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for key, value in c.function.arguments.items() %}{{ key }}="
    '{{ "\'" + value + "\'" if value is string else value | tojson if value is mapping else value | string }}'
    "{{ '' if loop.last else ', ' }}{% endfor %}){{ '' if loop.last else ', ' }}{% endfor %}]<|tool_call_end|>"
    "{% endif %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
"""LFM2.5, which shows values of calls as Python does, and calls reasoning `thinking`."""

LFM25_THINKING = LFM2.replace(
    "{{ '<|tool_response_start|>'",
    "{% if m.role == 'assistant' and not keep_past_thinking and rest[loop.index0 + 1:] | selectattr('role', 'equalto', "
    "'assistant') | list %}{% set content = content.split('</think>')[-1] | trim %}{% endif %}"
    "{{ '<|tool_response_start|>'",
)
"""LFM2.5 as first published: thoughts are part of the content, and only the last answer keeps its own."""

GRANITE4 = (
    SYSTEM
    + "<|start_of_role|>system<|end_of_role|>{{ first }}{% if tools %}<tools>{{ tools | map('tojson') | join('\n') }}"
    '</tools><tool_call>{{ \'\n{"name": <function-name>, "arguments": <args-json-object>}\n\' }}</tool_call>{% endif %}'
    "<|end_of_text|>{{ '\n' }}{% for m in rest %}"
    "{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|start_of_role|>user<|end_of_role|>{% endif %}"
    "{{ '\n' }}<tool_response>{{ '\n' + m.content + '\n' }}</tool_response>"
    "{{ '<|end_of_text|>\n' if loop.last or loop.nextitem.role != 'tool' }}"
    "{% else %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ '\n' if m.content or not loop.first }}<tool_call>{{ '\n' }}"
    '{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{{ '}\n' }}"
    "</tool_call>{% endfor %}<|end_of_text|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)

FAMILIES = {
    "qwen35": QWEN35, "qwen_coder": QWEN_CODER, "nemotron3": NEMOTRON3, "lfm2": LFM2, "lfm25": LFM25,
    "lfm25_thinking": LFM25_THINKING, "granite4": GRANITE4,
}  # fmt: skip
