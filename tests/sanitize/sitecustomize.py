"""AddressSanitizer ends a process that opens a library with RTLD_DEEPBIND. Nothing else here is named as ours is."""

import os

del os.RTLD_DEEPBIND
