"""Drills: faults on purpose, and comparisons with other libraries case by case."""

from bench.entries import Entry

FAULTS = (
    Entry(
        "resume",
        "Is a run that is killed 200 times and restarted equal to one that is not, bit for bit?",
        180,
        "drills.resume:main",
    ),
    Entry(
        "damage",
        "Is a checkpoint with damaged files noticed, and the previous one restored?",
        10,
        "drills.damage:main",
    ),
    Entry(
        "takeover",
        "Is a second process in a run's folder refused, and a killed one replaced at once?",
        15,
        "drills.takeover:main",
    ),
    Entry(
        "goodput",
        "What does a kill every minute cost?",
        5,
        "drills.goodput:main",
    ),
    Entry(
        "devices",
        "Does any run on eight CPU devices of two busy cores abort or hang?",
        30,
        "drills.devices:main",
    ),
    Entry(
        "spikes",
        "Are faults of data, gradients and weights noticed within two steps? What do they cost?",
        15,
        "drills.spikes:main",
    ),
    Entry(
        "fuzz",
        "Does each broken file, argument, number and path end in success or in a one-line error?",
        60,
        "drills.fuzz:main",
    ),
    Entry(
        "hostile_requests",
        "Does `serve` survive large and hostile requests, and clients that leave?",
        3,
        "drills.server:main",
        "the table's last part: openai",
    ),
    Entry(
        "plan",
        "How far is the memory that `plan` estimates from what compilers reserve?",
        90,
        "drills.plan:main",
        "libtpu or JAX's CUDA plugin",
    ),
    Entry(
        "plan_time",
        "How far is the step time that `plan` estimates from the real one?",
        5,
        "drills.plan_time:main",
    ),
    Entry(
        "planted_bugs",
        "Do the tests notice each of 44 planted bugs?",
        8,
        "drills.planted_bugs:main",
    ),
    Entry(
        "mutations",
        "Which share of small faults made by machine do the nearest tests notice?",
        300,
        "drills.mutations:main",
    ),
    Entry(
        "docs_commands",
        "Does every command and Python block of README and docs run?",
        60,
        "drills.docs_commands:main",
    ),
    Entry(
        "notebooks",
        "Does every notebook run from top to bottom without a warning?",
        20,
        "drills.notebooks:main",
    ),
)

COMPARISONS: tuple[Entry, ...] = ()

ENTRIES = (*FAULTS, *COMPARISONS)
