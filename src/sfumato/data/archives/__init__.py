"""Images in archives: WebDataset's tar shards, Parquet files, and ImageNet as it is published."""
