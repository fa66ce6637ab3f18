"""What is learned. `config` has the settings of each task, `task` the interface of all."""
