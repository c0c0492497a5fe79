"""`everstep bench`: measurements that anybody can repeat, with other libraries beside ours where there are some."""
