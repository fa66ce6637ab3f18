"""Loss spikes and updates that are not finite: noticed at every step, and dealt with.

`watch` is part of the compiled step: it says which updates are out of line, and those are skipped.
`lookout` reads on the host what it says; `plan` decides what to do where skipping does not help;
`record` and `recovery` do it, so that a process killed at any moment goes on to the same bits.
"""
