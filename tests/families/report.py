def summary(records, examples): return ""
