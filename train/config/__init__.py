"""Configuration: experiments by name, as plain data, and with `auto` resolved."""
