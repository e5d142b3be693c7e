"""The report: one HTML page that shows how runs went, made from the files in their folders. Not here: what a rank shows
while it trains (records)."""
