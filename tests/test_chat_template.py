"""Chat templates: what models need is there, and a template that means harm harms nobody."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import threading
import time
from collections import UserDict, UserList
from pathlib import Path
from types import MappingProxyType

import pytest
import tiny_pair
from resident import resident

from pyllama_dflash import Engine, RequestError, chat_template
from pyllama_dflash.chat_template import MAX_SOURCE, ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
SECONDS = 1.5


@pytest.fixture
def hasty(monkeypatch):
    """Less time for a template, so that the tests of endless ones end."""
    monkeypatch.setattr(chat_template, "MAX_SECONDS", SECONDS)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "013"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        ("{{ {'k': 'é<', 'n': [1, 2]} | tojson }}", '{"k": "é<", "n": [1, 2]}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ 'a' ~ 1 ~ ['b'] }}", "a1['b']"),
        ("{{ ['a', 1] | join('-') }}{{ '+'.join(['x', 'y']) }}", "a-1x+y"),
        ("{{ [{'n': 1}, {'n': 2}] | join(',', attribute='n') }}", "1,2"),
        ("{{ 'aXbX' | replace('X', '..') }}{{ 'aXbX'.replace('X', '', 1) }}", "a..b..abX"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{% generation %}x{{ 1 }}{% endgeneration %}", "x1"),
        ("{{ 7 % 4 + 2 * 3 }}{{ 'ab' * 2 }}{{ [1] + [2] }}", "9abab[1, 2]"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro m(context) %}{{ context.role }}{% endmacro %}{{ m(context=messages[0]) }}", "user"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        ("{{ missing is defined }}{{ missing }}", "False"),
    ],
)  # fmt: skip
def test_templates_find_the_usual_conventions(source, expected):
    assert ChatTemplate(source).render(messages=MESSAGES) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate given"),
        ("{% if %}", "in line 1"),
        ("{% if x %}", "end of template"),
        ("{% include 'x' %}", "no loader|TypeError"),
        ("{{ lipsum() }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ x.y.z }}", "UndefinedError"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion|nested|RecursionError"),
        ("x" * MAX_SOURCE + "y", "at most 1048576"),
        # What leads out of the sandbox.
        ("{{ ''.__class__.__mro__ }}", "SecurityError|unsafe"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "SecurityError|unsafe"),
        ("{{ raise_exception.__globals__.x }}", "SecurityError|unsafe"),
        ("{{ messages.append(1) }}", "SecurityError|unsafe"),
        ("{{ messages[0].update(role='x') }}", "SecurityError|unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError|unsafe|UndefinedError"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "SecurityError|unsafe"),
        ("{{ (messages | attr('__class__')).__mro__ }}", "SecurityError|unsafe|UndefinedError"),
    ],
    ids=lambda value: value[:60],
)  # fmt: skip
def test_templates_that_fail_or_reach_for_more(source, message):
    messages = [dict(m) for m in MESSAGES]
    with pytest.raises(RequestError, match=r"^chat template: ") as caught:
        ChatTemplate(source).render(messages=messages)
    assert re.search(message, f"{caught.value.value} given"), caught.value.value
    assert messages == MESSAGES


@pytest.mark.parametrize(
    "source", ["{{ ('{0.' ~ '__class__}').format(1) }}", "{{ messages | map(attribute='__class__') | join }}"]
)
def test_what_leads_out_leads_nowhere(source):
    assert ChatTemplate(source).render(messages=MESSAGES) == ""


def grown(step: str, start: str, times: int = 60) -> str:
    """A template whose x.s grows with each step."""
    return f"{{% set x = namespace(s={start}, n=9) %}}{{% for i in range({times}) %}}{step}{{% endfor %}}{{{{ x.s }}}}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{{ range(999999999) }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * [0] }}",
        "{{ 9 ** 999999999 }}",
        "{{ 1.5 | round(999999999, 'ceil') }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ 'a'.ljust(999999999) }}",
        "{{ 'a'.encode().zfill(10 ** 12) }}",
        "{{ (5).to_bytes(10 ** 12, 'big') }}",
        "{{ 'a' | center(999999999) }}",
        "{{ 'a\nb' | indent(999999999) }}",
        "{{ [1] | tojson(indent=999999999) }}",
        "{{ [1] | batch(10 ** 10, 'x') | list }}",
        "{{ [1] | slice(10 ** 10) | list }}",
        "{{ ([[0] * 10 ** 6] * 10 ** 6) | sum(start=[]) }}",
        grown("{% set x.s = x.s ~ x.s %}", "'ab'"),
        grown("{% set x.s = x.s + x.s %}", "'ab'"),
        grown("{% set x.s = x.s | replace('a', x.s) %}", "'aa'"),
        grown("{% set x.s = x.s.replace('a', x.s) %}", "'aa'"),
        grown("{% set x.s = x.s.join([x.s, x.s]) %}", "'aa'"),
        grown("{% set x.s = [x.s, x.s] | join %}", "'aa'"),
        grown("{% set b %}{{ x.s }}{{ x.s }}{% endset %}{% set x.s = b %}", "'ab'"),
        grown("{% set x.n = x.n * x.n %}", "''"),
        grown("{% set x.s = [x.s, x.s] %}", "['a']"),
        grown("{% set x.s = (x.s, x.s) %}", "('a',)") + "{{ {x.s: 1} }}",
        grown("{% set x.s = [x.s, x.s] %}", "['a']").replace("{{ x.s }}", "{{ x.s | tojson | length }}"),
        grown("{% set x.s = x.s + ['a' * 4000000 ~ i] %}", "[]", 99999),
    ],
    ids=lambda value: value[:90],
)
def test_templates_that_take_without_end(hasty, source):
    """Each is stopped by time, memory or output, wherever it goes to work; this process sees nothing of it."""
    assert ChatTemplate("{{ 1 }}").render() == "1"
    before, start = resident(), time.monotonic()
    with pytest.raises(RequestError, match=r"^chat template: ") as caught:
        ChatTemplate(source).render()
    limits = r"did not end within 1\.5 s|more than 512 MiB|the output passes|(Overflow|Recursion)Error|ended with -"
    assert re.search(limits, str(caught.value.value)), caught.value.value
    assert time.monotonic() - start < 10 and resident() - before < 8 << 20
    assert ChatTemplate("{{ 1 }}").render() == "1"


# -- the process -------------------------------------------------------------------------------------------------------


def test_a_rendering_costs_little():
    template, times = ChatTemplate(tiny_pair.CHAT_TEMPLATE), []
    for _ in range(50):
        start = time.perf_counter()
        text = template.render(messages=MESSAGES * 20)
        times.append(time.perf_counter() - start)
    assert text.count("<|im_start|>user") == 20
    print(f"first rendering {times[0] * 1e3:.1f} ms, then {sorted(times)[25] * 1e3:.2f} ms")
    assert sorted(times)[25] < 0.05


def test_templates_render_in_any_thread():
    template, results = ChatTemplate("{{ n }} {% for m in messages %}{{ m.role }} {% endfor %}"), {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: template.render(messages=MESSAGES, n=n)}))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: f"{n} user assistant " for n in range(8)}


def test_large_and_odd_texts_pass():
    content = "é\ud800\u2028\n\0" * 300_000
    assert ChatTemplate("{{ m }}").render(m=content) == content


def test_any_mapping_and_sequence_will_do():
    messages = (MappingProxyType(MESSAGES[0]), UserDict(content=UserList("ab"), role=1))
    assert ChatTemplate("{{ messages }}").render(messages=messages) == (
        "[{'role': 'user', 'content': 'hi'}, {'content': ['a', 'b'], 'role': 1}]"
    )


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", {(1, 2): 3}], ids=lambda value: type(value).__name__)
def test_variables_that_are_no_json(value):
    with pytest.raises(RequestError, match=r"^chat template's variables: .* expected values that JSON knows$"):
        ChatTemplate("{{ x }}").render(x=value)


def test_a_process_that_is_killed_is_replaced():
    assert ChatTemplate("{{ 1 }}").render() == "1"
    chat_template._SANDBOX._process.kill()
    with pytest.raises(RequestError, match=r"^chat template: its process ended with -9 given"):
        ChatTemplate("{{ 2 }}").render()
    assert ChatTemplate("{{ 3 }}").render() == "3"


def test_no_python_to_start(monkeypatch):
    chat_template._SANDBOX.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nonexistent/python")
        with pytest.raises(RequestError, match=r"^chat template: its process cannot start: .*No such file"):
            ChatTemplate("{{ 1 }}").render()
    assert ChatTemplate("{{ 1 }}").render() == "1"


def test_the_process_knows_little_of_this_one(monkeypatch):
    monkeypatch.setenv("A_SECRET", "x")
    monkeypatch.setenv("TZ", "UTC-3")
    chat_template._SANDBOX.close()
    assert abs(int(ChatTemplate("{{ strftime_now('%H') }}").render()) - (time.gmtime().tm_hour + 3) % 24) in (0, 1, 23)
    environment = Path(f"/proc/{chat_template._SANDBOX._process.pid}/environ").read_bytes()
    assert b"TZ=UTC-3\0" in environment and b"A_SECRET" not in environment
    chat_template._SANDBOX.close()


def test_forks_and_ends_leave_no_process():
    code = """
        import os, sys
        from pyllama_dflash import chat_template
        render = chat_template.ChatTemplate("{{ x }}").render
        print(render(x=1), flush=True)
        first = chat_template._SANDBOX._process.pid
        child = os.fork()
        if child == 0:
            print(render(x=2), chat_template._SANDBOX._process.pid != first, flush=True)
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), render(x=3))
        print(chat_template._SANDBOX._process.pid == first, first)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert (lines[:3], done.returncode, done.stderr) == (["1", "2 True", "7 3"], 0, "")
    same, pid = lines[3].split()
    assert same == "True"
    with pytest.raises(FileNotFoundError), open(f"/proc/{pid}/cmdline") as file:
        file.read()


def test_loading_renders_nothing(tmp_path):
    """A hostile template in a file costs nothing before somebody asks for it."""
    target = tiny_pair.TinyPair(rigged=True).target()
    target.kv["tokenizer.chat_template"] = ("str", "{{ 9 ** 999999999 }}")
    chat_template._SANDBOX.close()
    with Engine.load(target.write(tmp_path / "target.gguf"), device="cpu", threads=1, n_ctx=64) as engine:
        assert len(engine.generate("the", max_tokens=4, ignore_eos=True).tokens) == 4
        assert engine.tokenizer.chat_template.source == "{{ 9 ** 999999999 }}"
    assert chat_template._SANDBOX._process is None
