"""Every constant of speculation: what the models store and how the controller decides.

Times are in seconds, lengths in tokens, and rates and factors have no unit. The tests of speculation in simulated time
hold the constants to two goals: useless drafts cost at most 3%, and good ones come close to the best fixed tree.
"""

from __future__ import annotations

# --- Acceptance: how probable it is that drafted tokens are accepted ---

RATE_DEPTHS = 16
"""Depths that have an acceptance rate of their own; deeper nodes share the last one."""
RATE_SIBLINGS = 4
"""Positions among siblings that have an acceptance rate of their own; later ones share the last one."""
UNSEEN_TREES = 2.0
"""Trees after which a rank's observed mean counts as much as the extrapolation from the ranks before it."""
UNSEEN_DECAY = 0.98
"""Factor on the weight of a rank with each tree that was too small to include the rank."""
PRIOR_POSITIONS = 20.0
"""Positions after which a drafter's own probabilities count for half of what was observed of all sequences."""
PRIOR_POSITIONS_SEQUENCE = 4.0
"""Positions of one sequence after which its own hits count for half of the estimate."""
PRIOR_FALL = 0.6
"""Factor from each rank to the next before anything was observed."""
MAX_ACCEPTANCE = 0.99
"""Bound of every acceptance probability."""
CURVE_MEMORY, SEQUENCE_CURVE_MEMORY = 32.0, 8.0
"""Number of recent trees that count in the curve of all sequences, and in the curve of one sequence."""
HIT_MEMORY = 24.0
"""Number of recent positions that count in a recent hit rate."""
CALIBRATION_MEMORY = 100.0
"""Number of recent positions that count in the calibration of a drafter's probabilities."""
RATE_MEMORY = 64.0
"""Number of recent drafted tokens that count in each acceptance rate by depth and sibling."""

# --- Forecasts of trees ---

PRIOR_TREES = 3.0
"""Trees after which a sequence's own history counts as much as that of all others."""

# --- Latency: how long steps and proposals take ---

KNOT_MEMORY = 16
"""Number of recent samples that count in a knot's mean."""
SLOWDOWN_RATE = 0.125
"""Share of a sample's deviation (in logarithms) that goes into the slowdown, once several samples are known."""
SLOWDOWN_DECAY = 0.99
"""Exponent that pulls the slowdown back to 1 with each sample."""
MAX_SLOWDOWN = 1000.0
"""Bound of the slowdown as a factor, in both directions."""
KNOT_DECAY = 0.99
"""Factor on the weight of all other knots with each sample."""
MIN_KNOT_WEIGHT = 0.5
"""Smallest weight of a knot's old mean, in samples."""
ROW_RATE = 0.02
"""Share of a sample's deviation that goes into `row_seconds`."""
OUTLIER_FACTOR = 2.0
"""A sample further from the prediction than this factor is clipped to it, so that one outlier changes little."""
OUTLIER_MIN_SAMPLES = 3
"""Samples after which outliers are clipped. A profile may have been measured at a different speed."""
MIN_LATENCY_SECONDS = 1e-7
"""A shorter duration counts as this long, in seconds."""

# --- Measured speed-up: rounds with drafts against rounds without ---

MIN_PLAIN_ROUNDS = 1
"""Rounds without drafts that must be measured before any round has drafts."""
FEW_PLAIN_ROUNDS, MAX_PLAIN_DELAY = 4, 1.25
"""While fewer rounds without drafts than the first number were measured, one counts at most the second number times its
expected time: drafts would look fast beside a round that something else delayed."""
FIRST_PAUSE = 64
"""Rounds for which speculation is suspended the first time."""
MAX_PAUSE = 2048
"""Bound of the doubling pause, in rounds. A pause that makes up for lost time may be longer."""
LOSS_SHARE = 0.02
"""Largest share of the time that may be lost by rounds with drafts that are slower than rounds without."""
ROUND_DECAY = 1 - 1 / 32
"""Factor on the sums with each further round."""
MIN_SPEEDUP = 1.1
"""A lower measured speed-up suspends speculation. It is above 1 because drafts also cost time outside of the compared
rounds: drafters prefill prompts, and answers that end one by one have their successors' prompts read in more steps."""
MIN_SPEEDUP_ALONE = 0.97
"""`MIN_SPEEDUP` for a single sequence, for which a drafter prefills only one prompt."""
SURE_ROUNDS = 16
"""Number of rounds with drafts after which `MIN_SPEEDUP` is applied."""
CLEAR_LOSS = 0.9
"""A speed-up below this suspends speculation sooner."""
CLEAR_ROUNDS = 6
"""Number of rounds with drafts after which `CLEAR_LOSS` is applied."""

# --- The controller: sizes of trees, and rounds without them ---

SIZING_ROUNDS = 4
"""Rounds for which tree sizes hold while the same sequences decide."""
IDLE_SIZING_FACTOR = 16
"""How many times longer tree sizes hold while nothing is drafted."""
PROBED_SIZING_ROUNDS = 2
"""Rounds after a background probe until trees are sized anew. The target has decided on the probe by then."""
START_SPEEDUP, START_SPEEDUP_ALONE = 1.2, 1.03
"""Expected speed-up over plain decoding from which speculation starts. A single sequence needs less, because the
drafter then prefills only one prompt."""
STOP_SPEEDUP, STOP_SPEEDUP_ALONE = 1.1, 1.01
"""Expected speed-up over plain decoding below which speculation stops."""
CONTROL_ROUNDS = 64
"""Length of the periods at whose end a round has no drafts, so that the time of plain decoding stays known, in rounds
that may have drafts."""
FIRST_CONTROL_ROUNDS = 8
"""Length of the first control period of several sequences, in rounds. Each later period is twice as long, up to
`CONTROL_ROUNDS`."""
SURE_SPEEDUP = 1.5
"""From this expected speed-up on, rounds without drafts are `SURE_FACTOR` times less frequent."""
SURE_FACTOR = 4
"""How many times less frequent rounds without drafts are from `SURE_SPEEDUP` on."""
FULL_ROUNDS = 48
"""Rounds with drafts after which one round requests the largest trees, so that their value stays known."""
EAGER_ROWS = 4
"""Up to this many sequences request the largest trees before anything is observed, to learn fast at low cost."""
PATIENCE = 4.0
"""A round waits for proposals at most this many times their expected time."""
MIN_PATIENCE_SECONDS = 0.01
"""Shortest bound on the wait for proposals, in seconds."""
EVIDENCE_ROUNDS = 16
"""Rounds before a first draft in which a drafter on the target reads the steps, so that it has a context."""
TRIAL_SIZINGS = 2
"""How often a sequence that begins alone gets first drafts although those before it had no gain from drafts."""
LEARNED_TREES = 8
"""Most trees per round that the controller learns from, spread over the sequences, to bound the time that it takes."""

# --- Drafts on the target ---

CATCH_UP_RATE = 0.25
"""Share of a first draft's deviation that goes into the mean extra time of first drafts."""

# --- Probes: background drafts while speculation is suspended ---

PROBE_TIME_SHARE = 0.01
"""Largest share of the time that drafters spend on probes; prefills for probes get the same share."""
MIN_PROBE_SECONDS = 0.5e-3
"""A background call counts at least as long, in seconds: the coordinator also works for it."""
PROBED_SEQUENCES = 4
"""Sequences in one probe."""
FIRST_PROBE_PAUSE = 1 / 16
"""Factor on the pause between the first probes, when nothing is known."""
FIRST_PROBE_PAUSE_ON_TARGET = 1 / 2
"""Factor on the pause between the first probes of drafts on the target: a step waits for a probe there."""
NEW_SEQUENCE_PAUSE, NEW_SEQUENCE_PAUSE_ON_TARGET = 1.0, 4.0
"""Largest factor on the pause once there are sequences without measurements."""
MAX_PROBE_PAUSE = 8.0
"""Largest factor on the pause, which doubles while speculation costs time."""
OVERDUE_ROUNDS = 64
"""Rounds after which a probe that is due takes any sequence, because all answers are short."""
ROUND_RATE = 0.2
"""Share of a round's deviation that goes into the mean time of a round."""
LONGEST_ROUND = 1.0
"""Most seconds that one round counts in that mean."""
