"""Chat templates of the project's own, one for each form, which write an assistant's calls as the family's do."""

import json

import jinja2

# A message has `reasoning`, `content` and `calls`, each with `name` and `arguments`.
JSON_CALLS = """
{%- if content %}{{ content + '\\n' }}{% endif %}
{%- for call in calls %}
{{- '\\n' if not loop.first }}<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
{%- endfor %}"""
TEMPLATES = {
    "hermes": JSON_CALLS,
    "granite4": "{{ '<|start_of_role|>assistant<|end_of_role|>' if false }}" + JSON_CALLS,
    "qwen3_xml": """<think>
{{ reasoning }}
</think>

{{ content }}
{%- for call in calls %}
{{- '\\n\\n' if loop.first and content else ('\\n' if not loop.first) }}<tool_call>
<function={{ call.name }}>
{% for key, value in call.arguments.items() %}
<parameter={{ key }}>
{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
</parameter>
{% endfor %}
</function>
</tool_call>
{%- endfor %}""",
    "ling": """<think>{{ reasoning }}</think>{{ content }}
{%- for call in calls %}
{{- '\\n' if content or not loop.first }}<tool_call>{{ call.name }}
{% for key, value in call.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{%- endfor %}
{{ '\\n' }}</tool_call>
{%- endfor %}""",
    "kimi": """<think>{{ reasoning }}</think>{{ content }}
{%- if calls %}<|tool_calls_section_begin|>
{%- for call in calls %}<|tool_call_begin|>functions.{{ call.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>
{{- call.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>{% endif %}""",
    "lfm2": """<think>{{ reasoning }}</think>{{ content }}
{%- if calls %}<|tool_call_start|>[
{%- for call in calls %}
{{- ', ' if not loop.first }}{{ call.name }}(
{%- for key, value in call.arguments.items() %}
{{- ', ' if not loop.first }}{{ key }}=
{%- if value is string %}{{ "'" + value + "'" }}
{%- else %}{{ value | tojson if value is mapping else value | string }}{% endif %}
{%- endfor %})
{%- endfor %}]<|tool_call_end|>{% endif %}""",
    "nemotron_json": """{{ reasoning }}
</think>
{{ content }}
{%- if calls %}
{{- '\\n' if content }}<TOOLCALL>[
{%- for call in calls %}
{{- ', ' if not loop.first }}{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
{%- endfor %}]</TOOLCALL>
{%- endif %}""",
}


def rendered(form, calls, *, reasoning="", content=""):
    """What a template writes. Calls are pairs of a name and arguments."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    messages = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return environment.from_string(TEMPLATES[form]).render(calls=messages, reasoning=reasoning, content=content)
