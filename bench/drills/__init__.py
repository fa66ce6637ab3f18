"""Large drills, each a module that `make drills` runs: too long for the tests, and harsher."""
