from __future__ import annotations
import tempfile, shutil, os
class RunDirectory:
    def __init__(self, root):
        os.makedirs(root, exist_ok=True)
        self.path = tempfile.mkdtemp(prefix="memopt-", dir=root)
    def close(self): shutil.rmtree(self.path, ignore_errors=True)
