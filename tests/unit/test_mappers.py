"""Whether a process can still touch a segment."""

import os
import subprocess
import sys

from kvpool.memory.mappers import may_touch
from kvpool.memory.segment import SEGMENT_NAME, Segment


def test_a_process_touches_what_it_maps_or_has_open():
    fd = os.memfd_create(SEGMENT_NAME)
    os.ftruncate(fd, 4096)
    segment, own = Segment(fd, 4096), os.pidfd_open(os.getpid())
    inode = segment.inode
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        pidfd = os.pidfd_open(other.pid)
        try:
            assert may_touch(own, inode), "its descriptor is open"
            assert not may_touch(pidfd, inode)
            mapping = segment.map()
            segment.close()
            assert may_touch(own, inode), "it is mapped"
            mapping.close()
            assert not may_touch(own, inode)
            other.kill()
            other.wait()
            assert may_touch(pidfd, inode), "nothing is proved of a process that has ended"
        finally:
            os.close(pidfd)
            os.close(own)
