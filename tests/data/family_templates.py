"""Small chat templates with the peculiarities of published families, in our own words."""

# ruff: noqa: E501

# Any role as it is; the end-of-turn marker only after answers.
PLAIN_ROLES = (
    "{% if tools %}[tools]{{ tools | tojson }}</s>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# ChatML with Hermes' calls: tools in the system's turn, answers of tools joined in one user's turn.
HERMES = (
    "{% if tools %}<system>\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n"
    "{% endif %}<tools>{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}{{ '\n' }}</tools></s>\n"
    "{% elif messages[0].role == 'system' %}<system>\n{{ messages[0].content }}</s>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "<{{ m.role }}>\n{{ m.content }}</s>\n"
    "{% elif m.role == 'assistant' %}<assistant>{% if m.content %}{{ '\n' }}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}{% if c.function %}{% set c = c.function %}{% endif %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}</s>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<user>{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}</s>\n{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
# Qwen 3: what was thought before the last question is dropped.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>\n"
    "{% set content = m.content if m.content is string else '' %}"
    "{% set thought = m.reasoning_content if m.reasoning_content is string else '' %}"
    "{% if not thought and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}{{ content }}"
    "{% for c in m.tool_calls or [] %}{% if (loop.first and content) or not loop.first %}\n"
    "{% endif %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    "</tool_call>{% endfor %}</s>\n"
    "{% elif m.role == 'tool' %}<user>\n<tool_response>{{ m.content }}</tool_response></s>\n"
    "{% else %}<{{ m.role }}>\n{{ m.content }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% if enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Llama 3.1: one call a message, which takes the place of its content; a tool's content as JSON.
LLAMA = (
    "{{ bos_token }}{% set date = date_string or '26 Jul 2024' %}<system>Today: {{ date }}"
    "{% if tools %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}</s>"
    "{% for m in messages %}"
    "{% if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}"
    "<{{ m.role }}>{{ m.content | trim }}</s>"
    "{% elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}<assistant>"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}</s>'
    "{% else %}<ipython>{% if m.content is mapping or m.content is iterable %}"
    "{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Mistral 3: the question's end asks for the answer, calls have ids, and the tools stand before the
# last question, wherever its text stands again.
MISTRAL = (
    "{{ bos_token }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == asked[-1] %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}{{ c.function | tojson }}, {{ c.id }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }} {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
# DeepSeek: a message with calls is one whose content is null.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<User>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' and m['content'] is none %}<Assistant>"
    "{% for c in m['tool_calls'] %}<call>{{ c['type'] }}|{{ c['function']['name'] }}\n"
    "{{ c['function']['arguments'] | tojson }}</call>{% endfor %}</s>"
    "{% elif m['role'] == 'assistant' %}<Assistant>{{ m['content'] }}</s>"
    "{% elif m['role'] == 'tool' %}<output>{{ m['content'] }}</output>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<Assistant>{% endif %}"
)
# Gemma: another name for the assistant, no system, and content in parts.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}"
    "{% else %}{% for part in m.content or [] %}{{ part.text | trim }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}```{{ c.function | tojson }}```{% endfor %}"
    "<end>\n{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
# gpt-oss: channels, a call to a name, and past answers that end otherwise than the last.
CHANNELS = (
    "<start>system<message>Reasoning: {{ reasoning_effort or 'medium' }}<end>"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{% for c in m.tool_calls %}<start>assistant to={{ c.function.name }}<channel>commentary"
    "<message>{{ c.function.arguments | tojson }}<call>{% endfor %}"
    "{% elif m.role == 'assistant' %}<start>assistant<channel>final<message>{{ m.content }}"
    "{{ '<return>' if loop.last and not add_generation_prompt else '<end>' }}"
    "{% elif m.role == 'tool' %}<start>tool<message>{{ m.content | tojson }}<end>"
    "{% else %}<start>{{ m.role }}<message>{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant{% endif %}"
)
# Command R: documents of the row.
DOCUMENTS = (
    "{{ bos_token }}{% for d in documents or [] %}<doc>{{ d.title }}: {{ d.text }}</doc>{% endfor %}"
    + PLAIN_ROLES
)
# SmolLM 3: the template itself says what the assistant writes.
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>\n"
    "{% generation %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function | tojson }}</call>{% endfor %}</s>{% endgeneration %}\n"
    "{% else %}<{{ m.role }}>\n{{ m.content }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
FAMILIES = {
    "plain roles": PLAIN_ROLES,
    "hermes": HERMES,
    "thinking": THINKING,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "gemma": GEMMA,
    "channels": CHANNELS,
    "documents": DOCUMENTS,
    "generation": GENERATION,
}
