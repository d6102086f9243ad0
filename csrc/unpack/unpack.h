// unpack_<format> for every quantised format of blocks.h.
#ifndef QRT_UNPACK_H
#define QRT_UNPACK_H
#include "fp4.h"
#include "iq1.h"
#include "iq2.h"
#include "iq3.h"
#include "iq4.h"
#include "q2_k.h"
#include "q3_k.h"
#include "q4_0.h"
#include "q4_k.h"
#include "q5_0.h"
#include "q6_k.h"
#include "q8_0.h"
#include "tq.h"
#endif
