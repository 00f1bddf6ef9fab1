"""Detect ranks that fail or hang, and end the others with a message."""

#: Schedulers signal every process of a job, and the agent passes the signal on, too. A second
#: signal within this time, in seconds, counts as the same notice.
SAME_NOTICE_SECONDS = 3.0
