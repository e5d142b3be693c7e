"""What users look at: progress lines, hints, TensorBoard, the report. Not here: the records that these are made from
(records)."""
