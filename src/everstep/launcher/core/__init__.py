"""Pure: no clock, thread, socket, file or torch. Time comes in as an argument."""
