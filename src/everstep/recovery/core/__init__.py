"""Pure: no clock, thread, socket or file. Time comes in as an argument."""
