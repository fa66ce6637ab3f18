"""Program that renders chat templates: requests on its input, answers on its output, a line each.

    python template_process.py

A template comes with a downloaded model. Jinja's sandbox keeps it from running code, but not from
counting to 10^18 or from writing a text of 100 GB, and no check of its source could. Here the
system stops it: the process has a limit of memory, and each request one of processor time.

A request has the template's `source` and, for each text to write, its `variables`. The answer has
the `texts`, or an `error`. `train.data.chat_template` starts this file by its path, with no other
module of this library, and starts it again if it ends.
"""

import datetime
import functools
import json
import resource
import sys
import time
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 5
"""Processor time of a request. Published templates need milliseconds."""

MAX_BYTES = 2**30
"""Address space of the process. Python and Jinja take some 50 MB."""

MAX_EXPANSION, MAX_ADDITION = 10, 100_000
"""A text may have this many times the characters of its request, and so many more: what a template
writes by itself, such as instructions for the use of tools."""

# Noncharacters of Unicode, which no text has: edges of a `{% generation %}` block.
START, END = "\ufdd0", "\ufdd1"


class Generation(Extension):
    """The block `{% generation %}` of transformers, with marks at its edges."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (
            nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (START, END)
        )
        return [start, *body, end]


def raise_exception(message: str) -> None:
    """Refuse a conversation."""
    raise jinja2.TemplateError(message)


def tojson(value: Any, **options: Any) -> str:
    """Return JSON; unlike Jinja's own filter, without HTML escapes."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Return the compiled template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def answer(line: bytes) -> dict[str, Any]:
    """Return the answer to a request."""
    request = json.loads(line)
    limit = MAX_EXPANSION * len(line) + MAX_ADDITION
    texts = []
    try:
        template = compile_template(request["source"])
        for variables in request["variables"]:
            text = template.render(variables)
            if len(text) > limit:
                return {"error": f"writes {len(text):,} characters for {len(line):,} bytes"}
            texts.append(text)
    except MemoryError:
        return {"error": f"needs more than {MAX_BYTES >> 20:,} MiB of memory"}
    except Exception as error:  # noqa: BLE001 - a template can raise anything
        return {"error": (" ".join(str(error).split()) or type(error).__name__)[:1000]}
    return {"texts": texts}


def main() -> None:
    """Answer requests until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # macOS refuses the limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin.buffer:
        seconds = int(time.process_time()) + 1 + MAX_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard_limit))
        sys.stdout.buffer.write(json.dumps(answer(line)).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
