"""The order of the pages in the side bar."""

from docs.site.api_pages import API_PAGES

SECTIONS = {
    "Tutorial": (
        "tutorial/install",
        "tutorial/first_run",
        "tutorial/own_text",
        "tutorial/own_task",
        "tutorial/own_attention",
        "tutorial/scale_up",
        "tutorial/fine_tune",
    ),
    "Guides": (
        "Training <training>",
        "Data <data>",
        "tasks",
        "fine_tuning",
        "small_weights",
        "huggingface",
        "Memory, time and cost <plan>",
        "sharding",
        "resume",
        "recovery",
        "scaling",
        "colab",
        "cloud",
        "serving",
        "viewer",
        "reports",
        "profiling",
        "inspection",
        "extending",
        "errors",
    ),
    "Explanations": (
        "explanation/model",
        "explanation/masks",
        "explanation/stacked_layers",
        "explanation/exact_resume",
        "explanation/planning",
        "attention",
        "architecture",
    ),
    "Coming from": (
        "coming_from/huggingface",
        "coming_from/nanogpt",
        "coming_from/maxtext",
    ),
    "Reference": (
        "reference/settings",
        "reference/commands",
        "reference/messages",
        *(f"reference/{name}" for name in API_PAGES),
    ),
    "Notebooks": (
        "notebooks/train_and_sample",
        "notebooks/transformer_inside",
        "notebooks/translate",
        "notebooks/classify_and_tag",
        "notebooks/long_sequences",
        "notebooks/own_attention",
        "notebooks/scale",
        "notebooks/fine_tune_lora",
        "notebooks/scaling_laws",
        "notebooks/survive_failures",
    ),
    "Measurements": (
        "measurements",
        "performance",
        "claims",
        "results/README",
        "results/tasks",
        "results/speed",
        "results/speed_notes",
        "results/attention_notes",
        "results/reliability",
        "results/interop",
        "results/tests",
    ),
    "Project": ("changelog", "contributing", "releasing", "security"),
}
"""Pages of each section of the side bar, without `.md`; some with a title of their own."""


def contents(pages: list[str]) -> str:
    """Return the hidden tables of contents of the front page.

    Pages that no section names follow in a section of their own, so that a new page is never lost.
    """
    listed = {page_of(entry) for section in SECTIONS.values() for entry in section}
    written = [page.removesuffix(".md") for page in pages]
    other = [
        page
        for page in written
        if page not in listed and not page.startswith("source/") and page != "index"
    ]
    sections = {**SECTIONS, "More": tuple(other)} if other else SECTIONS
    parts = [""]
    for title, names in sections.items():
        lines = "\n".join(name for name in names if page_of(name) in written)
        if lines:
            parts.append(f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n{lines}\n```\n")
    return "\n".join(parts)


def page_of(entry: str) -> str:
    """Return the page of an entry, which may have a title: `Title <page>`."""
    return entry.rpartition("<")[2].removesuffix(">")
