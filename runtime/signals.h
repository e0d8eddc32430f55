// What the machine asks of a run: to stop, or to save.
#pragma once

// From now on SIGTERM and SIGINT are only noted, and a second one, a tenth of a second later or more, ends the process
// at once, with status 128 + signal; SIGUSR1 is noted too. After the first, a closed stdout or stderr does not end it.
void watch_signals();

struct Signals {
  int stop = 0;       // SIGTERM or SIGINT, if one came
  bool save = false;  // SIGUSR1 came since this was last asked
};
Signals noted_signals();
