"""The command line: parse and check first, import what is heavy afterwards."""
