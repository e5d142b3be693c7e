"""The processes of one attempt: who am I, how we meet, how we stop together."""
