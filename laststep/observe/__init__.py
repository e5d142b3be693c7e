"""What a rank shows while it trains: progress lines, hints, TensorBoard. Not here: the records that these are made from
(records), and the page that shows how runs went (report)."""
