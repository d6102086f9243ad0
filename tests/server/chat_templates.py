"""Templates of chat tests, each with one habit of public ones."""

from __future__ import annotations

# Qwen3.5's: opens <think> itself, XML calls, keeps reasoning behind the last question, raises on what it does not take.
QWEN = """
{%- if tools or messages[0].role == 'system' -%}
<|im_start|>system
{% if tools %}{{ tools|tojson }}<function=NAME>
{% endif %}{{ messages[0].content if messages[0].role == 'system' else '' }}<|im_end|>
{% endif -%}
{%- set last = namespace(user=-1) -%}
{%- for m in messages if m.role == 'user' %}{% set last.user = 0 %}{% endfor -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor -%}
{%- if last.user < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif -%}
{%- for m in messages -%}
    {%- set text = m.content|trim -%}
    {%- if m.role == 'system' -%}
        {%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif -%}
    {%- elif m.role == 'assistant' -%}
        {%- set part = namespace(why=m.reasoning_content or '', say=text) -%}
        {%- if not part.why and '</think>' in text -%}
            {%- set part.why = text.split('</think>')[0].split('<think>')[-1] -%}
            {%- set part.say = text.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if loop.index0 > last.user or preserve_thinking -%}
            {{- '<think>\\n' ~ part.why|trim ~ '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- part.say -}}
        {%- for call in m.tool_calls or [] -%}
            {{- ('\\n\\n' if part.say else '') if loop.first else '\\n' -}}
            {{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' -}}
            {%- for key, value in call.function.arguments|items -%}
                {%- set value = value if value is string else value|tojson -%}
                {{- '<parameter=' ~ key ~ '>\\n' ~ value ~ '\\n</parameter>\\n' -}}
            {%- endfor -%}
            {{- '</function>\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif m.role == 'tool' -%}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ text ~ '\\n</tool_response><|im_end|>\\n' -}}
    {%- else -%}
        {{- '<|im_start|>' ~ m.role ~ '\\n' ~ text ~ '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n<think>\\n' -}}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""

# Thinks on request only, and says what it was given.
QUIET = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% elif enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)

# One line a message, every field of it.
PLAIN = (
    "{% for m in messages %}{{ m.role }}:{{ m.name }}:{{ m.tool_call_id }}:{{ m.reasoning_content }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments|tojson }}]{% endfor %};"
    "{% endfor %}"
)
